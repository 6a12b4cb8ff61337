"""Greedy and beam search compared token by token with transformers' `generate`, a MarianMTModel of the same weights."""

from typing import Any

import pytest
import torch
from support.text_peers import END, START, make_marian, make_random_transformer, make_sources, run_marian
from torch import Tensor

from vitrail.models.base.text_contract import Memory
from vitrail.predict.search.beam_search import Stop, beam_search
from vitrail.predict.search.greedy_and_sampling import greedy
from vitrail.predict.search.hypothesis import Hypothesis

LENGTH = 28
SIZES: Any = {"vocabulary": 100, "width": 32, "heads": 4, "encoder_depth": 2, "decoder_depth": 2, "mlp_width": 64}
EARLY_STOPPING = {"exact": "never", "transformers": False, "first": True}
IDS: Any = {"start": START, "end": END, "length": LENGTH}


@pytest.fixture(scope="module")
def case() -> tuple[Any, Any, Tensor, Memory]:
    """Our model, theirs, 24 padded sentences and their memory."""
    model = make_random_transformer(**SIZES, ending=10, length=64, seed=1)
    sources = make_sources(24, SIZES["vocabulary"], (2, 14))
    with torch.inference_mode():
        return model, make_marian(model), sources, model.encode(sources)


def read_text(hypothesis: Hypothesis) -> list[int]:
    return [*hypothesis.tokens, *[END] * hypothesis.finished]


def test_greedy_tokens_are_equal(case: tuple[Any, Any, Tensor, Memory]) -> None:
    model, peer, sources, memory = case
    texts = [read_text(each) for each in greedy(model, memory, **IDS)]
    assert texts == run_marian(peer, sources, length=LENGTH, num_beams=1)
    assert len({len(text) for text in texts}) > 5  # they vary, and end
    assert sum(text[-1] == END for text in texts) > 15


@pytest.mark.parametrize("stop", EARLY_STOPPING)
@pytest.mark.parametrize("beam", [2, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_beam_tokens_are_equal(case: tuple[Any, Any, Tensor, Memory], beam: int, alpha: float, stop: Stop) -> None:
    """Each of our rules is one of theirs: "never", False and True."""
    model, peer, sources, memory = case
    options: Any = {"beam": beam, "penalty": "length", "alpha": alpha, "stop": stop}
    theirs: Any = {"num_beams": beam, "length_penalty": alpha, "early_stopping": EARLY_STOPPING[stop]}
    expected = run_marian(peer, sources, length=LENGTH, num_return_sequences=beam, **theirs)
    found = beam_search(model, memory, **IDS, **options, n_best=beam)
    assert [read_text(each) for hypotheses in found for each in hypotheses] == expected
    best = [read_text(hypothesis) for (hypothesis,) in beam_search(model, memory, **IDS, **options)]
    assert best == expected[::beam]
