"""The palette: seeded, at least as good as scikit-learn's from the same start, and never with an empty cluster."""

from typing import Any

import numpy as np
import pytest

from vitrail.base.errors import ConfigError
from vitrail.tasks.pretraining.igpt import (
    assign_points,
    choose_spread_points,
    compute_color_entropy,
    make_palette,
    run_kmeans,
)

PIXELS = np.round(np.random.default_rng(0).random((3000, 3)) ** 2 * 20) / 10 - 1  # many are equal


def test_the_palette_is_a_function_of_the_pixels_and_the_seed() -> None:
    palette = make_palette(PIXELS, 20, seed=1)
    assert palette.shape == (20, 3)
    np.testing.assert_array_equal(palette, make_palette(PIXELS, 20, seed=1))
    np.testing.assert_array_equal(palette, make_palette(PIXELS[::-1], 20, seed=1))
    assert not np.array_equal(palette, make_palette(PIXELS, 20, seed=2))
    assert len(np.unique(palette, axis=0)) == 20
    assert (np.diff(palette.sum(1)) >= 0).all()


def test_the_inertia_is_that_of_scikit_learn_from_the_same_centers() -> None:
    from sklearn.cluster import KMeans

    points, counts = np.unique(PIXELS, axis=0, return_counts=True)
    weights = counts.astype(np.float64)
    start = choose_spread_points(points, weights, 12, seed=0)
    centers, inertia = run_kmeans(points, weights, start)
    kmeans: Any = KMeans
    theirs = kmeans(12, init=start, n_init=1, algorithm="lloyd").fit(points, sample_weight=weights)
    assert inertia <= theirs.inertia_ * 1.005
    distances = np.square(PIXELS[:, None] - centers).sum(-1).min(1)
    assert distances.sum() == pytest.approx(inertia)


def test_an_empty_cluster_gets_the_farthest_point() -> None:
    points = np.array([[0.0], [0.1], [1.0], [5.0]])
    start = np.array([[0.0], [1.0], [90.0], [91.0]])  # no point is nearest to the last two
    centers, inertia = run_kmeans(points, np.array([3.0, 1.0, 1.0, 1.0]), start)
    assert len(np.unique(assign_points(points, centers)[0])) == 4
    assert inertia == 0


def test_more_colors_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"`colors` is 5, but 8 pixels .* only 2 different colors; use 2 or less"):
        make_palette(np.array([[0.0], [1.0]] * 4), 5, seed=0)


def test_the_entropy_of_the_colors() -> None:
    pixels = np.array([[-1.0], [-0.9], [1.0], [0.8]])
    assert compute_color_entropy(pixels, np.array([[-1.0], [1.0], [9.0]])) == pytest.approx(np.log(2))
