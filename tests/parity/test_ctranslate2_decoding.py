"""Greedy and beam search compared token by token with CTranslate2, on the same weights, post- and pre-norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.text_peers import END, START, make_ctranslate2, make_random_transformer, make_sources, run_ctranslate2
from torch import Tensor

from vitrail.models.base.text_contract import Memory
from vitrail.predict.search.beam_search import beam_search
from vitrail.predict.search.greedy_and_sampling import greedy
from vitrail.predict.search.hypothesis import Hypothesis

LENGTH = 30
SIZES: Any = {"vocabulary": 100, "width": 32, "heads": 4, "encoder_depth": 2, "decoder_depth": 2, "mlp_width": 64}
IDS: Any = {"start": START, "end": END, "length": LENGTH}


@pytest.fixture(scope="module", params=["post", "pre"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Tensor, Memory]:
    """Our model, theirs, 30 padded sentences and their memory."""
    model = make_random_transformer(**SIZES, ending=11, length=64, seed=1, norm=request.param)
    folder: Path = tmp_path_factory.mktemp(request.param)
    sources = make_sources(30, SIZES["vocabulary"], (2, 14))
    with torch.inference_mode():
        return model, make_ctranslate2(model, folder), sources, model.encode(sources)


def read_text(hypothesis: Hypothesis) -> list[int]:
    return [*hypothesis.tokens, *[END] * hypothesis.finished]


def test_greedy_tokens_are_equal(case: tuple[Any, Any, Tensor, Memory]) -> None:
    model, peer, sources, memory = case
    texts = [[read_text(each)] for each in greedy(model, memory, **IDS)]
    assert texts == run_ctranslate2(peer, sources, length=LENGTH, beam_size=1)
    assert len({len(text) for (text,) in texts}) > 5


@pytest.mark.parametrize("beam", [2, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_beam_tokens_are_equal(case: tuple[Any, Any, Tensor, Memory], beam: int, alpha: float) -> None:
    """It stops at the first `beam` hypotheses, or if α is 0 at the best one, which is exact."""
    model, peer, sources, memory = case
    found = beam_search(
        model, memory, **IDS, beam=beam, penalty="length", alpha=alpha, stop="first" if alpha else "exact"
    )
    expected = run_ctranslate2(peer, sources, length=LENGTH, beam_size=beam, length_penalty=alpha)
    assert [[read_text(each) for each in hypotheses] for hypotheses in found] == expected
    if alpha:
        n_best = beam_search(model, memory, **IDS, beam=beam, penalty="length", alpha=alpha, stop="first", n_best=beam)
        every = run_ctranslate2(peer, sources, length=LENGTH, beam_size=beam, length_penalty=alpha, num_hypotheses=beam)
        assert [[read_text(each) for each in hypotheses] for hypotheses in n_best] == every
