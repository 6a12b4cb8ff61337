"""Principal components of patch features: equal to scikit-learn's, for every model with a grid."""

from typing import Any

import numpy as np
import pytest
import torch
from support.toy_datasets import random_array

import vitrail
from vitrail.base.errors import ConfigError, VitrailError
from vitrail.inspection.representation.patch_pca import (
    MAX_FITTED_PATCHES,
    color_patches,
    components_to_colors,
    compute_patch_features,
    draw_patch_pca,
    find_foreground,
    fit_components,
)

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

HOW = vitrail.Preprocessing(image_size=32)


def make_features(rows: int = 40, width: int = 7) -> Any:
    return np.random.default_rng(0).normal(size=(rows, width)) * np.arange(1, width + 1) + 3


@pytest.mark.parametrize("rows", [5, 40, MAX_FITTED_PATCHES])
def test_components_equal_those_of_scikit_learn(rows: int) -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    features = make_features(rows)
    found, expected = fit_components(features), decomposition.PCA(3).fit(features)
    signs = np.sign((found.directions * expected.components_).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.directions, expected.components_ * signs, atol=1e-8)
    np.testing.assert_allclose(found.variance_shares, expected.explained_variance_ratio_, rtol=1e-9)
    np.testing.assert_allclose(found.project(features), expected.transform(features) * signs.T, atol=1e-8)
    assert (np.take_along_axis(found.directions, np.abs(found.directions).argmax(-1)[:, None], 1) > 0).all()


def test_sign_does_not_depend_on_the_sign_of_the_features() -> None:
    features = make_features()
    np.testing.assert_allclose(fit_components(-features).directions, fit_components(features).directions, atol=1e-9)


def test_colors_are_scaled_over_all_images() -> None:
    values = np.stack([np.arange(101.0), np.full(101, 7.0), -np.arange(101.0)], axis=1)
    colors = components_to_colors(values)
    assert colors[[0, 50, 100]].tolist() == [[0, 128, 255], [128, 128, 128], [255, 128, 0]]


def test_foreground_is_what_is_not_at_the_borders() -> None:
    first = np.zeros((2, 6, 6))
    first[:, 2:4, 1:5] = -5.0
    expected = first != 0
    np.testing.assert_array_equal(find_foreground(first), expected)
    np.testing.assert_array_equal(find_foreground(-first), expected)
    features = np.random.default_rng(0).normal(size=(2, 6, 6, 8)) * 0.1
    features[expected] += 10
    found = color_patches(features, foreground=True)
    assert found.foreground is not None
    np.testing.assert_array_equal(found.foreground, expected)
    assert not found.colors[~expected].any()
    assert len(np.unique(found.colors[expected], axis=0)) > 10


@pytest.mark.parametrize(
    ("preset", "fields", "grid", "width"),
    [
        ("vit_tiny_patch16_224", {"patch_size": 8, "width": 16, "heads": 2, "depth": 1, "registers": 2}, (4, 4), 16),
        ("cct_2_3x2_32", {"width": 16, "heads": 2, "depth": 1}, (8, 8), 16),
        ("resnet18", {"stages": (1, 1), "width": 8}, (4, 4), 16),
    ],
)
def test_every_model_with_a_grid(preset: str, fields: dict[str, Any], grid: tuple[int, int], width: int) -> None:
    model: Any = vitrail.create(preset, image_size=32, classes=0, **fields).eval()
    pixels = torch.randn(2, 3, 32, 32)
    found = compute_patch_features(model, pixels)
    assert found.shape == (2, *grid, width)
    if preset == "resnet18":
        expected = model.feature_maps(pixels)[-1].permute(0, 2, 3, 1)
    else:
        expected = model.tokens(pixels)[:, model.prefix :].unflatten(1, grid)
    torch.testing.assert_close(found, expected)
    figure = draw_patch_pca(model, [random_array(40, 50, 3, seed=n) for n in range(5)], batch=2, preprocessing=HOW)
    assert figure.arrays["colors"].shape == (5, *grid, 3)
    assert figure.arrays["photos"].shape == (5, 32, 32, 3)
    assert f"{grid[0]}×{grid[1]} patches of 5 images" in figure.caption
    assert len(figure.draw().axes[0].images) == 10, "each image and its colors"


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="2 patches of width 8 have no 3 principal components"):
        fit_components(np.zeros((2, 8)))
    model = vitrail.create("vit_tiny_patch16_224", image_size=32, patch_size=32, width=16, heads=2, depth=1, classes=0)
    with pytest.raises(ConfigError, match="1 patches"):
        draw_patch_pca(model, [random_array(32, 32, 3)], preprocessing=HOW)
    with pytest.raises(ConfigError, match="0 images; expected 1 to 64"):
        draw_patch_pca(model, [], preprocessing=HOW)
    with pytest.raises(ConfigError, match="images is one str"):
        draw_patch_pca(model, "example:cat", preprocessing=HOW)
    with pytest.raises(ConfigError, match="Conv2d has no config"):
        draw_patch_pca(torch.nn.Conv2d(3, 1, 3), [random_array(32, 32, 3)], preprocessing=HOW)
    with pytest.raises(VitrailError, match="NaN"):
        color_patches(np.full((1, 3, 3, 4), np.nan))


def test_explainer_draws_the_same_figure_and_says_where_its_methods_are() -> None:
    explainer = vitrail.Explainer("cct_cifar10")
    given = ["example:cat", "example:rocket"]
    expected = vitrail.draw_patch_pca("cct_cifar10", given, foreground=True)
    np.testing.assert_array_equal(explainer.pca(given, foreground=True).arrays["colors"], expected.arrays["colors"])
    found = explainer.neighbors(given, [*given, "example:coffee"], k=1)
    assert len(found.neighbors) == 2
    method: Any = "pca"
    with pytest.raises(ConfigError, match=r"^method 'pca' is of several images; use `Explainer.pca` with a list"):
        explainer.explain("example:cat", method)
