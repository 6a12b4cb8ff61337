"""Draw texts from a model: temperature, top-k and top-p. A draw is a function of the seed, the row and the position."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.rng import TOKEN_PURPOSE, make_view_keys, uniform_randoms
from vitrail.models.base.checks import check_count
from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.predict.search.greedy_search import (
    Hypothesis,
    Penalty,
    check_penalty,
    read_limits,
    select_largest,
    write_rows,
)


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
