"""Teaching figures match their formulas and captions."""

from math import erf, exp, pi, sqrt, tanh
from typing import Any, get_args, get_type_hints
from xml.etree import ElementTree

import numpy as np
import pytest

from vitrail.base.figures import CaptionedFigure
from vitrail.base.style import DIVERGING_MAP
from vitrail.inspection.representation.weight_patterns import position_similarity
from vitrail.recipes.recipe import OptimizationSettings
from vitrail.study.lesson_plots import (
    LESSON_FORMULAS,
    SCHEDULE_NAMES,
    compute_activations,
    compute_schedules,
    draw_activations,
    draw_lesson_figures,
    draw_schedules,
    draw_sinusoid_positions,
    sinusoid_tables,
)

needs_matplotlib = pytest.mark.usefixtures("matplotlib")


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def test_activations_match_their_closed_forms() -> None:
    x = np.linspace(-4, 4, 33)
    found = compute_activations(x)
    closed = {
        "gelu": [t * (1 + erf(t / sqrt(2))) / 2 for t in x],
        "tanh": [t * (1 + tanh(sqrt(2 / pi) * (t + 0.044715 * t**3))) / 2 for t in x],
        "relu": [max(0.0, t) for t in x],
        "silu": [t / (1 + exp(-t)) for t in x],
    }
    assert found.keys() == closed.keys()
    for name, values in closed.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-12)


def test_caption_names_the_largest_difference() -> None:
    figure = draw_activations()
    np.testing.assert_array_equal(figure.arrays["difference"], figure.arrays["gelu"] - figure.arrays["tanh"])
    assert "has a minimum of −0.17." in figure.caption
    assert "at most 4.7 · 10⁻⁴, at x = ±2.70" in figure.caption
    places = figure.arrays["x"][np.abs(figure.arrays["difference"]) > 4.7e-4]
    assert 2.6 < np.abs(places).min() < np.abs(places).max() < 2.8


def test_every_schedule_is_plotted() -> None:
    assert set(SCHEDULE_NAMES) == set(get_args(get_type_hints(OptimizationSettings)["schedule"]))


def test_schedules_match_their_closed_forms() -> None:
    found, t = compute_schedules(50, 10), np.arange(50)
    rise, done = (t + 1) / 10, (t - 10) / 40
    after = {"cosine": (1 + np.cos(pi * done)) / 2, "linear": 1 - done, "inverse_sqrt": np.sqrt(10 / (t + 1))}
    for name, values in found.items():
        expected = np.where(t < 10, rise, after.get(name, np.ones(50)))
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def test_position_tables_match_their_closed_forms() -> None:
    """Written out for 2×3 patches of width 8."""
    tables = sinusoid_tables((2, 3), 8)
    for patch in range(6):
        row, column = divmod(patch, 3)
        for i in range(4):
            angle = patch / 10000 ** (2 * i / 8)
            np.testing.assert_allclose(
                tables["1-D"][patch, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-6
            )
        for half, place in ((0, column), (4, row)):
            for i in range(2):
                angle = place / 10000 ** (2 * i / 4)
                pair = tables["2-D"][patch, half + 2 * i : half + 2 * i + 2]
                np.testing.assert_allclose(pair, [np.sin(angle), np.cos(angle)], atol=1e-6)


def test_similarity_of_sinusoids_depends_on_the_offset_alone() -> None:
    """sin a sin b + cos a cos b = cos(a − b), so the cosine is the mean of cos(offset · rate)."""
    tables = sinusoid_tables((3, 5), 16)
    rates = 10000 ** (-np.arange(0, 16, 2) / 16)
    expected = [np.cos((patch - 7) * rates).mean() for patch in range(15)]
    np.testing.assert_allclose(position_similarity(tables["1-D"], (3, 5))[1, 2].ravel(), expected, atol=1e-6)
    rates = 10000 ** (-np.arange(0, 8, 2) / 8)
    expected = [(np.cos((p % 5 - 2) * rates).mean() + np.cos((p // 5 - 1) * rates).mean()) / 2 for p in range(15)]
    np.testing.assert_allclose(position_similarity(tables["2-D"], (3, 5))[1, 2].ravel(), expected, atol=1e-6)


def test_tables_differ_as_in_the_caption() -> None:
    arrays = draw_sinusoid_positions().arrays
    row, column = arrays["patch"]
    one, two = arrays["cosine_1d"], arrays["cosine_2d"]
    assert one[row, column] == pytest.approx(1)
    assert one[row, column + 1] > one[row + 1, column] + 0.2  # 1-D: similar to the right neighbor, not to the one below
    assert one[row + 1, 0] > one[row + 1, column]  # similar across the edge
    assert two[row, column + 1] == pytest.approx(two[row + 1, column], abs=1e-5)  # 2-D: equally similar to both


@needs_matplotlib
@pytest.mark.parametrize(
    ("figure", "labels"),
    [
        (draw_activations(), ["activation", "input x", "difference, 10⁻⁴"]),
        (draw_schedules(), ["step", "learning rate relative to its peak"]),
        (draw_schedules(steps=1, warmup=0), ["step", "learning rate relative to its peak"]),
        (draw_sinusoid_positions(), ["dimension", "patch", "patch row", "patch column", "cosine similarity", "value"]),
        (draw_sinusoid_positions((2, 3), 8), ["dimension", "patch", "patch row", "patch column", "cosine similarity"]),
        (draw_sinusoid_positions((1, 1), 4), ["dimension", "patch"]),
    ],
    ids=lambda value: value.name if isinstance(value, CaptionedFigure) else "",
)
def test_figures(figure: CaptionedFigure, labels: list[str]) -> None:
    assert figure.to_png().startswith(b"\x89PNG")
    assert ElementTree.fromstring(figure.to_svg()).tag.endswith("svg")
    found = {text for axes in figure.draw().axes for text in (axes.get_xlabel(), axes.get_ylabel())}
    assert set(labels) <= found


@needs_matplotlib
def test_circle_marks_the_patch() -> None:
    figure = draw_sinusoid_positions((3, 7), 8)
    row, column = figure.arrays["patch"]
    rings = [line.get_xydata() for axes in figure.draw().axes for line in axes.lines]
    np.testing.assert_array_equal(np.asarray(rings, dtype=float), 2 * [[[column, row]]])
    assert figure.arrays["cosine_2d"].argmax() == row * 7 + column


@needs_matplotlib
def test_signed_values_have_a_neutral_middle() -> None:
    images: list[Any] = [image for axes in draw_sinusoid_positions().draw().axes for image in axes.images]
    signed = [image for image in images if image.get_array().min() < 0]
    assert len(signed) == 2
    assert {(image.get_cmap().name, *image.get_clim()) for image in signed} == {(DIVERGING_MAP, -1, 1)}


def test_all_lessons_have_formulas() -> None:
    assert [each.name for each in draw_lesson_figures()] == list(LESSON_FORMULAS)
