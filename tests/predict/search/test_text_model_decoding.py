"""Decoding with every kind of model: the cache, padding and other rows change no token."""

from typing import Any

import pytest
import torch
from support.text_models import TEXT_CASES, build_text_model, draw_sentences, pad_rows, read_source
from support.uncached_text_model import UncachedTextModel

from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.predict.search.beam_search import beam_search
from vitrail.predict.search.greedy_and_sampling import greedy, sample
from vitrail.predict.search.hypothesis import Hypothesis

LENGTHS = [7, 3, 5, 1, 6, 2]
SOURCE = pad_rows(draw_sentences(6, 7), LENGTHS)
ROWS = list(range(len(LENGTHS)))


@torch.inference_mode()
def decode_all_ways(model: TextModel, memory: Memory, rows: list[int]) -> list[list[Hypothesis]]:
    """The texts of each row by every method."""
    options: Any = {"start": 1, "end": 2, "length": 12}
    found = beam_search(model, memory, **options, beam=3, n_best=2)
    drawn = sample(model, memory, **options, count=2, numbers=rows, top_k=5, seed=1)
    return [[a, *b, *c] for a, b, c in zip(greedy(model, memory, **options), found, drawn, strict=True)]


def assert_same_texts(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    for each, other in zip(ours, theirs, strict=True):
        assert [text.tokens for text in each] == [text.tokens for text in other]
        assert [text.score for text in each] == pytest.approx([text.score for text in other], abs=1e-4)


@pytest.mark.parametrize("case", TEXT_CASES)
def test_texts_with_a_cache_are_those_without(case: str) -> None:
    model = build_text_model(case)
    memory = read_source(model, SOURCE)
    texts = decode_all_ways(model, memory, ROWS)
    assert_same_texts(texts, decode_all_ways(UncachedTextModel(model), memory, ROWS))
    assert len({text.tokens for row in texts for text in row}) > 8  # they differ


@pytest.mark.parametrize("case", TEXT_CASES)
def test_a_sentence_gets_the_same_texts_in_a_batch_as_alone_and_without_padding(case: str) -> None:
    model = build_text_model(case)
    together = decode_all_ways(model, read_source(model, SOURCE), ROWS)
    for row, length in enumerate(LENGTHS):
        memory = read_source(model, SOURCE[row : row + 1, :length])
        assert memory.kept is None or memory.kept.all()
        assert_same_texts(together[row : row + 1], decode_all_ways(model, memory, [row]))
