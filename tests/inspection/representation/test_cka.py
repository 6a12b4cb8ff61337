import numpy as np
import pytest
from numpy.typing import NDArray
from support.figure_checks import check_figure

from vitrail.base.errors import ConfigError
from vitrail.inspection.representation.token_statistics import draw_cka, linear_cka

Array = NDArray[np.float64]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def hsic(k: Array, m: Array) -> float:
    """The estimate of Song 2012, equation 4, term by term."""
    n, one = len(k), np.ones(len(k))
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    sums = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (np.trace(k @ m) + sums - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


@pytest.mark.parametrize("shape", [(4, 9, 5), (3, 4, 20), (2, 50, 3), (1, 6, 1)])
def test_matches_the_formula(shape: tuple[int, int, int]) -> None:
    features = normal(*shape) + 3  # not centered
    features[1:] += features[:1]
    kernels = [each @ each.T for each in features]
    expected = [[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in kernels] for a in kernels]
    assert linear_cka(features) == pytest.approx(np.array(expected), abs=1e-9)


def test_invariant_to_rotation_scale_and_shift() -> None:
    features = normal(20, 8)
    rotation = np.linalg.qr(normal(8, 8, seed=1))[0]
    stretched = features * np.linspace(0.1, 3, 8)
    found = linear_cka(np.stack([features, features @ rotation * 7 + 5, -features, stretched]))
    assert found[:3, :3] == pytest.approx(np.ones((3, 3)))
    assert found == pytest.approx(found.T)
    assert np.all(found[3, :3] < 0.95), "not invariant to other linear maps"


def test_independent_features_are_near_zero_with_fewer_images_than_dimensions() -> None:
    features = normal(2, 40, 400)
    assert abs(linear_cka(features)[0, 1]) < 0.1
    centered = features - features.mean(1, keepdims=True)
    a, b = (each @ each.T for each in centered)
    assert (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) > 0.8, "the biased estimate is not near 0"


def test_large_offsets_in_float32_are_harmless() -> None:
    features = normal(3, 16, 6).astype(np.float32)
    assert linear_cka(features + np.float32(1000)) == pytest.approx(linear_cka(features), abs=1e-3)


def test_features_equal_for_all_images_give_nan() -> None:
    features = normal(3, 100, 300)
    features[1] = features[1, 0]  # the mean of 100 equal numbers is not always that number
    found = linear_cka(features)
    assert np.isnan(found[1]).all()
    assert np.isnan(found[:, 1]).all()
    assert found[np.ix_([0, 2], [0, 2])].diagonal() == pytest.approx([1, 1])
    figure = draw_cka(found)
    check_figure(figure)
    assert "state 1 is the same for all images" in figure.caption


@pytest.mark.parametrize("shape", [(2, 3, 8), (12, 8)])
def test_too_few_images_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="4 images or more"):
        linear_cka(np.ones(shape))


@pytest.mark.parametrize("states", [1, 2, 13])
def test_figure(states: int) -> None:
    matrix = linear_cka(np.cumsum(normal(states, 12, 6), axis=0))
    figure = draw_cka(matrix)
    check_figure(figure, "after the embedding (0) and each block", "linear CKA")
    image = figure.draw().axes[0].images[0]
    assert np.allclose(np.asarray(image.get_array()), matrix)
    assert image.get_clim()[1] == 1
    assert image.get_clim()[0] <= matrix.min()


def test_caption_names_the_largest_change() -> None:
    matrix = np.array([[1, 0.9, 0.2], [0.9, 1, 0.35], [0.2, 0.35, 1]])
    assert "from state 1 to 2 (CKA 0.35)" in draw_cka(matrix).caption
