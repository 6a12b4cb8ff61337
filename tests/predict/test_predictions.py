"""From numbers to named classes, in numpy alone."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitrail.base.errors import VitrailError
from vitrail.predict.predictions import (
    ClassProbability,
    Prediction,
    predictions_from_logits,
    softmax,
)

FINITE = st.floats(-1e4, 1e4, width=32)


@given(arrays(np.float32, (3, 7), elements=FINITE))
def test_softmax_is_torchs(logits: np.ndarray) -> None:
    assert np.allclose(softmax(logits), torch.from_numpy(logits).softmax(-1).numpy(), atol=1e-6)


@given(arrays(np.float32, (2, 6), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0])))
def test_the_likeliest_first_and_of_equal_ones_the_first(logits: np.ndarray) -> None:
    for row, found in zip(logits.tolist(), predictions_from_logits(logits, None, 4), strict=True):
        expected = sorted(range(6), key=lambda n: (-row[n], n))[:4]
        assert [each.index for each in found.top] == expected
        assert all(each.label is None for each in found.top)


def test_huge_numbers_do_not_overflow() -> None:
    found = predictions_from_logits(np.array([[3e38, -3e38, 0]], np.float32), None, 3)[0]
    assert [(each.index, each.probability) for each in found.top] == [(0, 1.0), (2, 0.0), (1, 0.0)]


@pytest.mark.parametrize("row", [[np.nan, 0, 0], [np.inf, 0, 0], [-np.inf] * 3])
def test_what_is_no_number_is_an_error(row: list[float]) -> None:
    with pytest.raises(VitrailError, match="the model returns NaN; expected finite weights"):
        predictions_from_logits(np.array([[0, 1, 2], row], np.float32), None, 1)


def test_minus_infinity_is_never() -> None:
    found = predictions_from_logits(np.array([[0, -np.inf]], np.float32), ["a", "b"], 2)[0]
    assert found.top == (ClassProbability(0, "a", 1.0), ClassProbability(1, "b", 0.0))


def test_more_than_there_are() -> None:
    assert len(predictions_from_logits(np.zeros((1, 3), np.float32), None, 10)[0].top) == 3
    assert predictions_from_logits(np.zeros((0, 3), np.float32), None, 1) == []


def test_names_for_people() -> None:
    assert ClassProbability(3, "n01443537 goldfish, Carassius auratus", 0.5).name == "goldfish"
    assert ClassProbability(3, None, 0.5).name == "class 3"


def test_likeliest_classes() -> None:
    logits = np.array([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]], np.float32)
    first, second = predictions_from_logits(logits, ["x", "y, z", ""], 2)
    assert [each.index for each in first.top] == [1, 2]
    assert [each.index for each in second.top] == [0, 1]  # ties in the order of the classes
    expected = np.exp([2.0, 1.0]) / np.exp([0.0, 2.0, 1.0]).sum()
    assert [each.probability for each in first.top] == pytest.approx(expected)
    assert [each.name for each in first.top] == ["y", "class 2"]


def test_names_of_labels() -> None:
    names = [ClassProbability(3, label, 0.5).name for label in (None, "", "tench, Tinca tinca", " a ", " , b", "a,")]
    assert names == ["class 3", "class 3", "tench", "a", "b", "a"]


CAT = Prediction((ClassProbability(0, "n02123045 tabby, tabby cat", 0.9), ClassProbability(7, "tiger\ncat", 0.052)))


def test_a_prediction_prints_as_aligned_lines_without_ids() -> None:
    assert str(CAT).splitlines() == ["90.0%  tabby", " 5.2%  tiger\\ncat"]
    assert repr(CAT) == str(CAT)
    sure = Prediction((ClassProbability(3, None, 1.0), ClassProbability(4, "b", 0.0)))
    assert str(sure).splitlines() == ["  100.0%  class 3", "<0.0001%  b"]


def test_a_notebook_shows_bars_with_escaped_names() -> None:
    html = Prediction((ClassProbability(0, "<b>bold</b>", 0.75), *CAT.top))._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "&lt;b&gt;bold" in html
    assert "<b>" not in html
    assert "width: 75.0%" in html
    assert "75.0%" in html
    assert "tabby" in html
    assert not re.search("[^-]color:", html), "text keeps the color of the notebook's theme"
