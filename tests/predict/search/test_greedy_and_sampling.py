"""Sampling, on a model whose logits are a random function of the whole text so far."""

import math
from typing import Any

import pytest
import torch
from support.table_text_model import END, START, TableTextModel, extend, list_texts, make_memory, read_text

from vitrail.predict.search.greedy_and_sampling import draw_tokens, greedy, sample

IDS: Any = {"start": START, "end": END}
ROWS = [5, 2, 9, 4]


def test_sampling_in_its_limits_is_greedy_search() -> None:
    model, rows = TableTextModel(seed=11), list(range(30))
    memory = make_memory(model, rows)
    expected = greedy(model, memory, **IDS, length=8)
    limits: list[Any] = [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}, {"temperature": 1e-300, "top_k": 3}]
    for limit in limits:
        assert [drawn for (drawn,) in sample(model, memory, **IDS, length=8, **limit)] == expected


def test_the_same_seed_draws_the_same_texts_and_another_seed_others() -> None:
    model = TableTextModel(seed=12)
    memory = make_memory(model, ROWS)
    options: Any = {**IDS, "length": 8, "count": 4}
    first = sample(model, memory, **options, seed=1)
    assert first == sample(model, memory, **options, seed=1)
    assert first != sample(model, memory, **options, seed=2)
    assert first != sample(model, memory, **options, seed=1, numbers=[1, 2, 3, 4])
    assert len({read_text(each) for each in first[0]}) > 1
    for row in range(len(ROWS)):  # fewer draws of a row are the first of them
        assert sample(model, memory, **IDS, length=8, count=2, seed=1)[row] == first[row][:2]


# the 0.999 quantile of χ² with 1, …, 5 degrees of freedom
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, None, 1.0, 6),
        (0.5, None, 1.0, 6),
        (2.0, 3, 1.0, 3),
        (1.0, None, 0.8, 3),
        (1.0, 4, 0.7, 2),
        (1.5, 5, 1.0, 5),
    ],
)
def test_frequencies_are_the_probabilities(temperature: float, top_k: int | None, top_p: float, kept: int) -> None:
    """Of draws at a fixed seed, compared with shares computed by hand."""
    shares = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.15, 0.05], dtype=torch.float64)
    number = 20_000
    draws = torch.rand(number, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = draw_tokens(shares.log().float().expand(number, -1), draws, temperature, top_k, top_p)
    observed = tokens.bincount(minlength=6).double()
    expected = shares ** (1 / temperature)
    order = expected.argsort(descending=True, stable=True)
    expected[order[kept:]] = 0
    expected *= number / expected.sum()
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < CHI_SQUARE[kept - 1]


def test_texts_are_drawn_as_often_as_they_are_probable() -> None:
    model, count = TableTextModel(seed=13), 3000
    texts = sample(model, make_memory(model, [3]), **IDS, length=2, count=count)[0]
    observed = dict[tuple[int, ...], int]()
    for each in texts:
        observed[read_text(each)] = observed.get(read_text(each), 0) + 1
    shares = [(text, allowed_share(model, 3, text)) for text in list_texts(2)]
    assert sum(share for _, share in shares) == pytest.approx(1, abs=1e-5)
    statistic = sum((observed.get(text, 0) - count * share) ** 2 / (count * share) for text, share in shares)
    assert statistic < 45.3  # the 0.999 quantile of χ² with 20 degrees of freedom


def allowed_share(model: TableTextModel, row: int, text: tuple[int, ...]) -> float:
    """The probability of a text if padding and start are impossible."""
    share = 1.0
    for length, token in enumerate(text):
        parts = {word: math.exp(part) for word, part in extend(model, row, text[:length])}
        share *= parts[token] / sum(parts.values())
    return share
