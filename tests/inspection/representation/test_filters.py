from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.figure_checks import check_figure

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.inspection.representation.weight_patterns import (
    draw_filters,
    filter_to_image,
    find_first_filters,
    principal_filters,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_family.py"


def normal(*shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("shape", [(40, 3, 2, 3), (5, 1, 4, 4), (12, 4, 1, 2)])
def test_components_are_eigenvectors_of_the_covariance(shape: tuple[int, ...]) -> None:
    weight = normal(*shape) * np.linspace(1, 4, shape[-1]) + 2  # the mean is not a component
    components, shares = principal_filters(weight, count=4)
    values, vectors = np.linalg.eigh(np.cov(weight.reshape(len(weight), -1), rowvar=False))
    values, vectors = values[::-1], vectors.T[::-1]
    assert components.shape == (4, *shape[1:])
    assert shares == pytest.approx(values[:4] / values.sum())
    for component, vector in zip(components.reshape(4, -1), vectors, strict=False):
        assert abs(component @ vector) == pytest.approx(1)
        assert component[np.abs(component).argmax()] > 0


def test_planted_patterns_are_found_in_order() -> None:
    patterns = np.linalg.qr(normal(27, 2))[0].T
    along = np.array([[3.0, 1], [3, -1], [-3, 1], [-3, -1]])  # variances 9 and 1
    weight = (along @ patterns + 5).reshape(4, 3, 3, 3)
    components, shares = principal_filters(weight)
    assert shares[:2] == pytest.approx([0.9, 0.1])
    for component, pattern in zip(components.reshape(len(components), -1), patterns, strict=False):
        assert component == pytest.approx(pattern * np.sign(pattern[np.abs(pattern).argmax()]))


def test_no_component_without_variance() -> None:
    _, shares = principal_filters(normal(5, 3, 4, 4))
    assert len(shares) == 4
    assert shares.min() > 1e-6


def test_fewer_components_than_requested_and_equal_filters() -> None:
    components, shares = principal_filters(normal(6, 1, 2, 2), count=28)
    assert components.shape == (4, 1, 2, 2)
    assert shares.sum() == pytest.approx(1)
    components, shares = principal_filters(np.ones((3, 1, 2, 2)))
    assert shares == pytest.approx(np.zeros(2)), "three centered filters have rank 2"
    check_figure(draw_filters(components, shares))


SMALL: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "image_size": 32}


@pytest.mark.parametrize(
    ("name", "fields", "place", "shape"),
    [
        ("ViT-Ti/16", {"patch_size": (8, 4), **SMALL}, "patch_embed.proj.weight", (16, 3, 8, 4)),
        ("ViT-Ti/16", {"channels": 1, "registers": 3, **SMALL}, "patch_embed.proj.weight", (16, 1, 16, 16)),
        ("DeiT-Ti-distilled", {"channels": 4, **SMALL}, "patch_embed.proj.weight", (16, 4, 16, 16)),
        ("R26+ViT-S/32", {"stages": (1,), **SMALL}, "patch_embed.backbone.stem.conv.weight", (64, 3, 7, 7)),
        ("R+ViT-Ti/16", {"channels": 1, **SMALL}, "patch_embed.backbone.conv.weight", (64, 1, 7, 7)),
        ("cct_2_3x2_32", {"neighbors": True, **SMALL}, "patch_embed.layers.0.weight", (64, 3, 3, 3)),
        ("ResNet-20", {"stages": (1, 1)}, "conv1.weight", (16, 3, 3, 3)),
        ("RegNetY-4GF", {"stages": (1, 1, 1, 1), "channels": 1}, "stem.conv.weight", (32, 1, 3, 3)),
        (f"{EXAMPLE}:resmlp_tiny", {"depth": 1}, "patch_embed.proj.weight", (192, 3, 16, 16)),
    ],
)
def test_the_first_filters_of_every_family(
    name: str, fields: dict[str, Any], place: str, shape: tuple[int, ...]
) -> None:
    model = vitrail.create(name, **fields)
    found = find_first_filters(model)
    assert found is not None
    assert found.shape == shape
    assert np.array_equal(found, model.get_parameter(place).detach().numpy())


def test_half_precision_and_models_without_a_convolution() -> None:
    model = vitrail.create("ViT-Ti/16", **SMALL).to(torch.bfloat16)
    found = find_first_filters(model)
    assert found is not None
    assert found.dtype == np.float32
    assert find_first_filters(vitrail.create("t2t_vit_7", image_size=32, depth=1)) is None


def test_zero_is_drawn_as_mid_gray() -> None:
    component = np.array([[[0.0, 0.2], [-0.4, 0.1]]])
    assert filter_to_image(component)[..., 0] == pytest.approx(np.array([[0.5, 0.75], [0.0, 0.625]]))
    colored = normal(3, 4, 2)
    assert filter_to_image(colored) == pytest.approx(0.5 + colored.transpose(1, 2, 0) / np.abs(colored).max() / 2)
    assert filter_to_image(normal(5, 4, 2)).shape == (4, 2, 1)
    assert filter_to_image(np.zeros((1, 2, 2))) == pytest.approx(np.full((2, 2, 1), 0.5))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((40, 3, 16, 16), "in RGB"),
        ((2, 1, 2, 3), "in grayscale"),
        ((40, 5, 3, 1), "as the mean of 5 channels"),
        ((40, 3, 16, 2), "in RGB"),
        ((40, 3, 4, 32), "in RGB"),
    ],
)
def test_figure(shape: tuple[int, ...], words: str) -> None:
    components, shares = principal_filters(normal(*shape))
    captioned = draw_filters(components, shares)
    check_figure(captioned, "principal component: share of the filters' variance", f"0: {shares[0]:.1%}")
    assert words in captioned.caption
    assert f"{shares.sum():.1%} of the filters' variance" in captioned.caption
    figure = captioned.draw()
    figure.draw_without_rendering()
    with_image = [axes for axes in figure.axes if axes.images]
    assert len(with_image) == len(components)
    for left, right in pairwise(with_image[:7]):
        assert left.xaxis.label.get_window_extent().x1 < right.xaxis.label.get_window_extent().x0, "labels overlap"


def test_wrong_shapes_are_errors() -> None:
    with pytest.raises(ConfigError, match="width, channels, rows, columns"):
        principal_filters(np.ones((4, 3)))
    with pytest.raises(ConfigError, match="0 components"):
        principal_filters(np.ones((4, 3, 2, 2)), count=0)
