"""A text that a model has written, its score, and what greedy search, sampling and beam search share.

Of a model they know only `start`, `step` and the `reorder` of its state. Padding and the start token are never written.
R rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.models.base.checks import check_count
from vitrail.models.base.text_contract import TextModel

Penalty = Literal["length", "gnmt"]
MAX_ALPHA = 10
MAX_BEAM = 100  # texts of a row at once: with 64 rows and 37,000 tokens their logits take a gigabyte


@dataclass(frozen=True)
class Hypothesis:
    """A text that a model has written, with what the model thinks of it."""

    tokens: tuple[int, ...]  # without start and end
    score: float  # the log-probability divided by the length penalty
    log_probability: (
        float  # natural logarithm, of the tokens and, if finished, the end; the temperature changes nothing
    )
    finished: bool  # False: cut at the maximum length, without an end
    token_log_probabilities: tuple[float, ...] = ()  # of each token; the end, if there is one, last


def compute_penalty(penalty: Penalty, length: int, alpha: float) -> float:
    """What divides the log-probability of `length` tokens, the end counted.

    "length": |Y|^α, as in transformers and CTranslate2; "gnmt": ((5 + |Y|)/6)^α, Wu et al. 2016, as in the paper of the
    Transformer with α = 0.6.
    """
    return (length if penalty == "length" else (5 + length) / 6) ** alpha


def check_penalty(penalty: str, alpha: float) -> None:
    if penalty not in get_args(Penalty):
        raise unknown_name_error("`penalty`", penalty, get_args(Penalty))
    if not 0 <= alpha <= MAX_ALPHA:
        raise ConfigError(f"`alpha` is {alpha!r}; expected a number of at least 0 and at most {MAX_ALPHA}")


def check_beam(name: str, value: int) -> None:
    """A number of texts that are written at once for each row."""
    check_count(name, value)
    if value > MAX_BEAM:
        raise ConfigError(f"`{name}` is {value}; expected at most {MAX_BEAM}")


def read_limits(length: int | Tensor, rows: int) -> list[int]:
    """The maximum number of tokens of every row, the end counted."""
    if isinstance(length, Tensor) and length.shape != (rows,):
        raise ConfigError(
            f"`length` has shape {tuple(length.shape)}; expected a number, or one for each of {rows} rows"
        )
    limits: list[int] = length.tolist() if isinstance(length, Tensor) else [length] * rows
    for limit in limits:
        check_count("length", limit)
    return limits


def list_forbidden(model: TextModel, start: int, end: int, device: torch.device) -> Tensor:
    """Tokens that are never written. Some vocabularies start with the end token, which must be possible."""
    return torch.tensor(sorted({model.config.pad, start} - {end}), dtype=torch.int64, device=device)


def compute_log_probabilities(logits: Tensor, forbidden: Tensor) -> Tensor:
    """Of every next token, −∞ for those forbidden, whose share is not distributed to the others: (R, V) → (R, V)."""
    return F.log_softmax(logits, -1, dtype=torch.float32).index_fill_(1, forbidden, -math.inf)


def select_largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row in order, and where they are; of equal ones the first: (R, N) → 2 × (R, count).

    topk alone takes any of several equal values, and another one on another device.
    """
    found, indices = values.topk(min(count + 1, values.shape[1]))
    if found[:, 1:].eq(found[:, :-1]).any():
        found, indices = values.sort(dim=1, descending=True, stable=True)
    return found[:, :count], indices[:, :count]


def check_numbers(hypothesis: Hypothesis) -> Hypothesis:
    if math.isnan(hypothesis.log_probability):
        raise ConfigError(
            "the logits of the model are not numbers (NaN): its weights are damaged, or training diverged"
        )
    return hypothesis


def close_gaps(live: Sequence[int]) -> list[int]:
    """The live rows, the last moved into the gaps: [0, 2, 3, 5] → [0, 5, 2, 3]. The others stay: few are copied."""
    staying = set(live)
    moved = (row for row in live if row >= len(live))
    return [row if row in staying else next(moved) for row in range(len(live))]


def make_hypothesis(text: list[int], parts: list[float], end: int, penalty: Penalty, alpha: float) -> Hypothesis:
    total, finished = math.fsum(parts), text[-1] == end
    score = total / compute_penalty(penalty, len(text), alpha)
    return check_numbers(Hypothesis(tuple(text[: len(text) - finished]), score, total, finished, tuple(parts)))
