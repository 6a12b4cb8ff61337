import math

import numpy as np
import pytest
from numpy.typing import NDArray
from support.figure_checks import check_figure

from vitrail.inspection.representation.token_statistics import (
    compute_token_cosines,
    draw_class_distillation_similarity,
    draw_token_norms,
    find_norm_outliers,
    token_norms,
)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=shape)


def test_norms_and_cosines_match_a_loop() -> None:
    a, b = normal(2, 3, 5), normal(2, 3, 5, seed=1)
    norms, cosines = token_norms(a), compute_token_cosines(a, b)
    for place in np.ndindex(2, 3):
        assert norms[place] == pytest.approx(math.dist(a[place], [0] * 5))
        dot = sum(x * y for x, y in zip(a[place], b[place], strict=True))
        assert cosines[place] == pytest.approx(dot / math.hypot(*a[place]) / math.hypot(*b[place]))
    assert compute_token_cosines(a, -3 * a) == pytest.approx(-np.ones((2, 3)))
    assert compute_token_cosines(a, np.zeros_like(a)) == pytest.approx(np.zeros((2, 3)))


def test_half_precision_does_not_overflow() -> None:
    tokens = np.full((2, 256), 60, dtype=np.float16)  # 60² · 256 overflows float16
    assert token_norms(tokens) == pytest.approx([960, 960])
    assert compute_token_cosines(tokens, tokens) == pytest.approx([1, 1])


def test_exactly_the_planted_outliers_are_found() -> None:
    norms = 10 + normal(6, 196)
    planted = np.zeros(norms.shape, dtype=bool)
    planted[0, :4] = planted[2, 100] = planted[5, ::5] = True  # 4, 1, and a fifth of all
    norms[planted] *= 5
    assert np.array_equal(find_norm_outliers(norms), planted)


def test_outliers_are_relative_to_their_image() -> None:
    quiet, loud = 10 + normal(50), 100 + 10 * normal(50)
    assert not find_norm_outliers(np.stack([quiet, loud])).any()
    quiet[7] = 100
    found = find_norm_outliers(np.stack([quiet, loud]))
    assert np.argwhere(found).tolist() == [[0, 7]]


def test_both_conditions_are_needed() -> None:
    alike = np.full(30, 10.0)
    alike[3] = 10.1  # zero deviation, but hardly longer
    assert not find_norm_outliers(alike).any()
    assert find_norm_outliers(alike, times=1.0).tolist() == [False] * 3 + [True] + [False] * 26
    spread = np.linspace(1, 21, 41)  # the longest is nearly twice the median, within 4 deviations
    spread[-1] = 23
    assert not find_norm_outliers(spread).any()
    assert find_norm_outliers(spread, deviations=1.0)[-1]


@pytest.mark.parametrize(
    ("states", "images", "prefix", "grid"), [(13, 4, 1, (14, 14)), (1, 1, 0, (2, 3)), (3, 2, 6, (5, 1))]
)
def test_figure_of_norms(states: int, images: int, prefix: int, grid: tuple[int, int]) -> None:
    norms = 10 + normal(states, images, prefix + grid[0] * grid[1])
    figure = draw_token_norms(norms, [f"register{n}" for n in range(prefix)], grid)
    check_figure(figure, "after the embedding (0) and each block", "token norm", "mean norm after the last block")
    left, right, *_ = figure.draw().axes
    median, *lines = (np.asarray(line.get_ydata()) for line in left.lines)
    patches = norms[..., prefix:]
    assert np.allclose(median, np.median(patches.reshape(states, -1), axis=1))
    assert np.allclose(lines, norms[..., :prefix].mean(1).T) if prefix else not lines
    assert np.allclose(np.asarray(right.images[0].get_array()), patches[-1].mean(0).reshape(grid))
    assert "No patch has an outlier norm" in figure.caption
    assert figure.arrays["outliers"].shape == patches.shape


def test_outliers_reach_the_caption_and_a_log_axis() -> None:
    norms = 10 + normal(3, 2, 1 + 50)
    norms[..., 0] = 1000  # the class token is not a patch
    norms[1, 0, 10] = 500
    figure = draw_token_norms(norms, ["class"], (5, 10))
    check_figure(figure)
    assert "1.00% of the patches" in figure.caption
    assert "state 1" in figure.caption
    assert figure.arrays["outliers"].sum() == 1
    assert figure.arrays["outliers"][1, 0, 9]
    assert figure.draw().axes[0].get_yscale() == "log"
    assert draw_token_norms(np.zeros((2, 1, 6)), (), (2, 3)).draw().axes[0].get_yscale() == "linear"


@pytest.mark.parametrize("cosines", [np.array([0.2]), np.linspace(0.1, 0.99, 13), np.array([-0.8, 0.5])])
def test_figure_of_similarity(cosines: NDArray[np.float64]) -> None:
    figure = draw_class_distillation_similarity(cosines)
    check_figure(figure, "after the embedding (0) and each block", "cosine similarity")
    axes = figure.draw().axes[0]
    assert np.allclose(np.asarray(axes.lines[0].get_ydata()), cosines)
    assert axes.get_ylim()[0] < cosines.min()
    assert f"{cosines[0]:.2f} at the start, {cosines[-1]:.2f} at the end" in figure.caption
