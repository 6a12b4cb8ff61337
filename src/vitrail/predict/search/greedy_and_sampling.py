"""Write a text token by token: the most probable ones, or drawn at random by temperature, top-k and top-p.

A draw is a function of the seed, the row and the position. R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.rng import TOKEN_PURPOSE, make_view_keys, uniform_randoms
from vitrail.models.base.checks import check_count
from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.predict.search.hypothesis import (
    Hypothesis,
    Penalty,
    check_penalty,
    close_gaps,
    compute_log_probabilities,
    list_forbidden,
    make_hypothesis,
    read_limits,
    select_largest,
)

Chooser = Callable[[Tensor, list[int], int], Tensor]  # log-probabilities (R, V), rows, position → tokens (R,)


@torch.inference_mode()
def write_rows(
    model: TextModel,
    memory: Memory,
    choose: Chooser,
    *,
    start: int,
    end: int,
    limits: Sequence[int],
    copies: int = 1,
    penalty: Penalty,
    alpha: float,
) -> list[Hypothesis]:
    """Write each row of the memory `copies` times; `choose` picks the next tokens. Finished rows leave the batch."""
    device = memory.tokens.device
    forbidden = list_forbidden(model, start, end, device)
    texts: list[list[int]] = [[] for _ in range(len(limits) * copies)]
    parts: list[list[float]] = [[] for _ in texts]
    if not texts:
        return []
    rows = list(range(len(limits)))  # the text that each row of the state belongs to
    tokens = torch.full((len(rows),), start, device=device)
    state = model.start(memory, max(limits))
    for position in range(max(limits)):
        logits, state = model.step(tokens, state)
        if position == 0 and copies > 1:  # the memory and the first token are read once for all copies
            repeated = torch.arange(len(rows), device=device).repeat_interleave(copies)
            logits, state, rows = logits[repeated], state.reorder(repeated), list(range(len(texts)))
        log_probabilities = compute_log_probabilities(logits, forbidden)
        tokens = choose(log_probabilities, rows, position)
        chosen = log_probabilities.gather(1, tokens[:, None])[:, 0]
        written: list[int] = tokens.tolist()
        for row, token, log_probability in zip(rows, written, chosen.tolist(), strict=True):
            texts[row].append(token)
            parts[row].append(log_probability)
        limit = position + 1
        live = [i for i, row in enumerate(rows) if written[i] != end and limit < limits[row // copies]]
        if not live:
            break
        if len(live) < len(rows):
            kept = close_gaps(live)
            rows, order = [rows[i] for i in kept], torch.tensor(kept, device=device)
            tokens, state = tokens[order], state.reorder(order)
    return [make_hypothesis(*each, end, penalty, alpha) for each in zip(texts, parts, strict=True)]


def greedy(
    model: TextModel,
    memory: Memory,
    *,
    start: int,
    end: int,
    length: int | Tensor,
    penalty: Penalty = "gnmt",
    alpha: float = 0.6,
) -> list[Hypothesis]:
    """One text per row, of the most probable tokens, at most `length` with the end. The penalty is for the score."""
    check_penalty(penalty, alpha)
    limits = read_limits(length, len(memory.tokens))
    return write_rows(model, memory, choose_best, start=start, end=end, limits=limits, penalty=penalty, alpha=alpha)


def choose_best(log_probabilities: Tensor, rows: list[int], position: int) -> Tensor:  # noqa: ARG001
    return log_probabilities.argmax(1)


def sample(
    model: TextModel,
    memory: Memory,
    *,
    start: int,
    end: int,
    length: int | Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    count: int = 1,
    numbers: Sequence[int] | None = None,
    penalty: Penalty = "gnmt",
    alpha: float = 0.6,
) -> list[list[Hypothesis]]:
    """`count` texts per row, in the order drawn, each of at most `length` tokens. The penalty is for the score.

    Each token is drawn from the `top_k` most probable (None: all), and of these from the fewest that together have a
    share of `top_p`. `numbers` are those of the rows, by default 0, 1, …: a row with the same number and seed gets the
    same draws in any batch.
    """
    check_penalty(penalty, alpha)
    check_sampling(temperature, top_k, top_p)
    check_count("count", count)
    limits = read_limits(length, len(memory.tokens))
    keys = np.asarray(range(len(limits)) if numbers is None else numbers)
    if len(keys) != len(limits):
        raise ConfigError(f"`numbers` has {len(keys)} entries; expected one for each of {len(limits)} rows")

    def choose(log_probabilities: Tensor, rows: list[int], position: int) -> Tensor:
        texts = np.asarray(rows)
        draw_keys = make_view_keys(seed, keys[texts // count], texts % count, position)
        draws = torch.from_numpy(uniform_randoms(draw_keys, 1, TOKEN_PURPOSE)).to(log_probabilities.device)
        return draw_tokens(log_probabilities, draws, temperature, top_k, top_p)

    texts = write_rows(
        model, memory, choose, start=start, end=end, limits=limits, copies=count, penalty=penalty, alpha=alpha
    )
    return [texts[first : first + count] for first in range(0, len(texts), count)]


def check_sampling(temperature: float, top_k: int | None, top_p: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"`temperature` is {temperature!r}; expected more than 0; use greedy search for the limit of 0"
        )
    if top_k is not None:
        check_count("top_k", top_k)
    if not 0 < top_p <= 1:
        raise ConfigError(f"`top_p` is {top_p!r}; expected more than 0 and at most 1, where 1 keeps all tokens")


def draw_tokens(
    log_probabilities: Tensor, draws: Tensor, temperature: float, top_k: int | None, top_p: float
) -> Tensor:
    """The token at which the cumulated shares pass the draw in [0, 1): (R, V), (R, 1) → (R,)."""
    values, tokens = log_probabilities, None
    if top_k is not None:
        values, tokens = select_largest(values, top_k)
    elif top_p < 1:
        values, tokens = values.sort(dim=1, descending=True, stable=True)
    largest = values.amax(1, keepdim=True)
    shares = ((values - largest).double() / temperature).softmax(1)  # the largest is 0, at any temperature
    cumulated = shares.cumsum(1)
    total = cumulated[:, -1:]
    if top_p < 1:
        last = (cumulated - shares < top_p * total).sum(1, keepdim=True) - 1
        total = cumulated.gather(1, last)
    places = torch.searchsorted(cumulated, draws * total, right=True)  # passes over tokens without a share
    places = places.clamp(max=values.shape[1] - 1)  # NaN, which is reported at the end, is not found at all
    return (places if tokens is None else tokens.gather(1, places))[:, 0]
