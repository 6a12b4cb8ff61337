import math
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from support.figure_checks import check_figure

from vitrail.base.errors import ConfigError
from vitrail.inspection.attention.attention_distance import (
    attention_distance,
    correlate_ranks_with_depth,
    draw_attention_distance,
    patch_distances,
    uniform_attention_distance,
)

Grid = tuple[int, int]


def shift(grid: Grid, rows: int, columns: int, *, wrap: bool) -> NDArray[np.float64]:
    """Maps in which every patch attends only to the one `rows` down and `columns` to the right: (1, n, n)."""
    h, w = grid
    maps = np.zeros((1, h * w, h * w))
    for r, c in product(range(h), range(w)):
        down, right = ((r + rows) % h, (c + columns) % w) if wrap else (min(r + rows, h - 1), min(c + columns, w - 1))
        maps[0, r * w + c, down * w + right] = 1
    return maps


def random_maps(*shape: int) -> NDArray[np.float64]:
    maps = np.random.default_rng(0).random(shape) ** 8
    return maps / maps.sum(-1, keepdims=True)


def with_prefix(patches: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add two prefix tokens; each patch gives the share `kept` (n,) to patches and the rest to them."""
    maps = np.zeros((*patches.shape[:-2], patches.shape[-1] + 2, patches.shape[-1] + 2))
    maps[..., :2, :] = 1 / maps.shape[-1]
    maps[..., 2:, 2:] = kept[:, None] * patches
    maps[..., 2:, 0], maps[..., 2:, 1] = 0.9 * (1 - kept), 0.1 * (1 - kept)
    return maps


@pytest.mark.parametrize("grid", [(4, 6), (1, 5), (3, 2)])
@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("patch", [(16, 16), (8, 20), (4, 2.5)])
def test_shifted_columns_match_the_closed_form(grid: Grid, columns: int, patch: tuple[float, float]) -> None:
    k, w = columns, grid[1]
    wrapped = attention_distance(shift(grid, 0, k, wrap=True), grid, patch)
    assert wrapped == pytest.approx(patch[1] * 2 * k * (w - k) / w)  # k for w − k of them, w − k for k of them
    clamped = attention_distance(shift(grid, 0, k, wrap=False), grid, patch)
    assert clamped == pytest.approx(patch[1] * (k * (w - k) + k * (k - 1) / 2) / w)


def test_larger_and_diagonal_shifts() -> None:
    grid, patch = (5, 8), (10, 3)
    assert attention_distance(shift(grid, 0, 3, wrap=True), grid, patch) == pytest.approx(3 * 2 * 3 * 5 / 8)
    assert attention_distance(shift(grid, 0, 3, wrap=False), grid, patch) == pytest.approx(3 * (15 + 3) / 8)
    assert attention_distance(shift(grid, 2, 0, wrap=True), grid, patch) == pytest.approx(10 * 2 * 2 * 3 / 5)
    inside, below, right, corner = 4 * 7, 7, 4, 1  # of 40 patches, those whose neighbor is in both, one or no axis
    expected = inside * math.hypot(10, 3) + below * 3 + right * 10 + corner * 0
    assert attention_distance(shift(grid, 1, 1, wrap=False), grid, patch) == pytest.approx(expected / 40)


def test_uniform_attention() -> None:
    for w in (1, 2, 7):
        assert uniform_attention_distance((1, w), (9, 4)) == pytest.approx(
            4 * (w * w - 1) / (3 * w)
        )  # mean |i − j| of 0 … w − 1
    grid, patch = (3, 5), (16, 8)
    places = [(r * 16, c * 8) for r in range(3) for c in range(5)]
    mean = sum(math.dist(a, b) for a in places for b in places) / 15**2
    assert uniform_attention_distance(grid, patch) == pytest.approx(mean)
    assert attention_distance(np.full((2, 17, 17), 1 / 17), grid, patch) == pytest.approx([mean, mean])


def test_random_maps_match_a_loop() -> None:
    grid, patch, maps = (2, 3), (7, 5), random_maps(2, 3, 4, 8, 8)  # two prefix tokens
    found = attention_distance(maps, grid, patch)
    assert found.shape == (2, 3, 4)
    for place in np.ndindex(2, 3, 4):
        total = 0.0
        for i, j in product(range(6), range(6)):
            row = maps[place][i + 2]
            distance = math.hypot(7 * (i // 3 - j // 3), 5 * (i % 3 - j % 3))
            total += distance * row[j + 2] / sum(row[2:]) / 6
        assert found[place] == pytest.approx(total)
    assert attention_distance(maps.astype(np.float16), grid, patch) == pytest.approx(found, rel=2e-3)


def test_prefix_tokens_are_dropped_and_rows_renormalized() -> None:
    grid, patch = (3, 4), (2, 2)
    patches = random_maps(5, 12, 12)
    maps = with_prefix(patches, np.linspace(0.05, 0.95, 12))
    assert np.allclose(maps.sum(-1), 1)
    found = attention_distance(maps, grid, patch)
    assert found == pytest.approx(attention_distance(patches, grid, patch))
    kept = maps[:, 2:, 2:]
    weighted = (kept * patch_distances(grid, patch)).sum(-1)
    assert np.all(np.abs(weighted.mean(-1) / found - 1) > 0.1), "not the value of rows without normalization"
    assert np.all(np.abs(weighted.sum(-1) / kept.sum((-1, -2)) / found - 1) > 0.001), "nor of a common normalization"
    maps[:, :2] = np.eye(14)[:2]
    assert attention_distance(maps, grid, patch) == pytest.approx(found), "the rows of prefix tokens do not matter"


def test_rows_without_attention_on_patches_are_excluded() -> None:
    grid, kept = (1, 4), np.array([0.0, 0.5, 1.0, 0.25])
    maps = with_prefix(shift(grid, 0, 2, wrap=True), kept)
    maps[:, 2 + 1, 2:] = 0.5 * np.eye(4)[1]  # patch 1 at itself: 0 counts
    assert attention_distance(maps, grid, (1, 10)) == pytest.approx((0 + 20 + 20) / 3)
    empty = with_prefix(shift(grid, 0, 2, wrap=True), np.zeros(4))
    both = attention_distance(np.concatenate([empty, maps]), grid, (1, 10))
    assert np.isnan(both[0])
    assert both[1] == pytest.approx(40 / 3)


@pytest.mark.parametrize("shape", [(2, 5, 5), (2, 1, 7), (6, 6)])
def test_wrong_shapes_are_errors(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="2·3 = 6"):
        attention_distance(np.ones(shape), (2, 3), (1, 1))


def test_rank_correlation() -> None:
    assert correlate_ranks_with_depth(np.array([1.0, 2.0, 30.0])) == pytest.approx(1)
    assert correlate_ranks_with_depth(np.array([3.0, 2.0, -10.0])) == pytest.approx(-1)
    values = np.random.default_rng(1).permutation(12)
    by_hand = 1 - 6 * ((values - np.arange(12)) ** 2).sum() / (12 * (12**2 - 1))  # without ties
    assert correlate_ranks_with_depth(values.astype(float) ** 3) == pytest.approx(by_hand)
    tied = np.corrcoef([0, 1.5, 1.5, 3], [0, 1, 2, 3])[0, 1]
    assert correlate_ranks_with_depth(np.array([1.0, 2.0, 2.0, 3.0])) == pytest.approx(tied)
    assert math.isnan(correlate_ranks_with_depth(np.array([5.0])))
    assert math.isnan(correlate_ranks_with_depth(np.array([5.0, 5.0])))
    assert correlate_ranks_with_depth(np.array([1.0, np.nan, 2.0])) == pytest.approx(1), "layers with NaN are excluded"


@pytest.mark.parametrize("shape", [(12, 3), (1, 1), (2, 40)])
def test_figure(shape: tuple[int, int]) -> None:
    distances = np.random.default_rng(0).random(shape) * 200
    figure = draw_attention_distance(distances, images=1234, image_size=(64, 96), even=50.0)
    check_figure(figure, "layer", "distance (pixels)")
    assert "1,234 images of 64×96 pixels" in figure.caption
    assert f"{distances[0].mean():.1f} pixels in layer 0" in figure.caption
    (axes,) = figure.draw().axes
    (dots,), (line, even) = axes.collections, axes.lines
    offsets = np.asarray(dots.get_offsets())
    assert np.allclose(offsets, [(layer, distances[layer, head]) for layer, head in np.ndindex(shape)])
    assert np.allclose(np.asarray(line.get_ydata()), distances.mean(1))
    assert np.allclose(np.asarray(even.get_ydata()), 50)
    assert axes.get_ylim()[1] > distances.max()
    assert np.array_equal(figure.arrays["distances"], distances)


def test_figure_with_a_head_of_nan() -> None:
    figure = draw_attention_distance(np.array([[1.0, np.nan], [3.0, 5.0]]), images=1, image_size=(8, 8), even=7.5)
    check_figure(figure)
    assert "7.5 pixels (dashed line)" in figure.caption
    assert "1 image of" in figure.caption
    axes = figure.draw().axes[0]
    assert np.allclose(np.asarray(axes.lines[0].get_ydata()), [1, 4])
    assert axes.get_ylim()[1] > 7.5
