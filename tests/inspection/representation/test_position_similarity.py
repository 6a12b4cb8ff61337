from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.figure_checks import check_figure
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.base.style import DIVERGING_MAP, SEQUENTIAL_MAP
from vitrail.inspection.representation.weight_patterns import (
    compare_near_and_far,
    draw_position_similarity,
    find_position_table,
    position_similarity,
    tile_maps,
)
from vitrail.layers.positions import sinusoid_1d

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_family.py"
TOY: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "classes": 2}


def normal(*shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).normal(size=shape)


def test_cosines_match_a_loop() -> None:
    table, (h, w) = normal(6, 5), (2, 3)
    found = position_similarity(table, (h, w))
    assert found.shape == (2, 3, 2, 3)
    for a, b, c, d in product(range(h), range(w), range(h), range(w)):
        x, y = table[a * w + b], table[c * w + d]
        assert found[a, b, c, d] == pytest.approx(x @ y / (np.sqrt(x @ x) * np.sqrt(y @ y)))


def test_sinusoids_depend_on_the_offset_alone() -> None:
    table = sinusoid_1d((3, 4), 32).numpy()
    found = position_similarity(table, (3, 4)).reshape(12, 12)
    for i, j in product(range(12), range(12)):
        assert found[i, j] == pytest.approx(found[0, abs(i - j)], abs=1e-5)
    assert found[0, 6] < 0.9


def test_rows_of_zeros_and_wrong_shapes() -> None:
    table = normal(4, 3)
    table[2] = 0
    found = position_similarity(table, (2, 2))
    assert found[1, 0] == pytest.approx(np.zeros((2, 2)))
    assert found[0, 0, 0, 0] == pytest.approx(1)
    with pytest.raises(ConfigError, match="2·2 = 4 patches"):
        position_similarity(normal(5, 3), (2, 2))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViT-Ti/16", {"image_size": (32, 48)}),
        ("ViT-Ti/16", {"image_size": (32, 48), "registers": 3, "prefix_positions": False}),
        ("ViT-Ti/16", {"image_size": (32, 48), "registers": 3, "positions_at": "layers"}),
        ("ViT-Ti/16", {"image_size": (32, 48), "positions_at": "shared"}),
        ("ViT-Ti/16", {"image_size": (32, 48), "positions": "learned_2d"}),
        ("ViT-Ti/16", {"image_size": (32, 48), "positions": "sincos_2d"}),
        ("ViT-Ti/16", {"image_size": (32, 48), "positions": "sincos", "class_token": False, "pool": "mean"}),
        ("DeiT-Ti-distilled", {"image_size": (32, 48)}),
        ("DeiT-III-S", {"image_size": (32, 48)}),
        ("R26+ViT-S/32", {"image_size": (16, 24), "stages": (1, 1)}),
        ("cct_2_3x2_32", {"image_size": (8, 12), "stem": (8,)}),
    ],
)
def test_table_is_what_every_family_adds_to_its_patches(name: str, fields: dict[str, Any]) -> None:
    model = add_weight_noise(vitrail.create(name, **TOY, **fields))
    captured: dict[str, Tensor] = {}

    def keep_patches(_: nn.Module, __: Any, out: Tensor) -> None:
        captured["patches"] = out

    def keep_input(_: nn.Module, given: Any) -> None:
        captured["input"] = given[0]

    model.get_submodule("patch_embed").register_forward_hook(keep_patches)
    model.get_submodule("blocks.0").register_forward_pre_hook(keep_input)
    with torch.no_grad():
        model(torch.randn(1, 3, *fields["image_size"]))
    table = find_position_table(model)
    assert table is not None
    assert table.shape == (6, 16)
    added = captured["input"][0, -6:] - captured["patches"][0]
    assert table == pytest.approx(added.numpy(), abs=1e-5)
    assert np.abs(table).max() > 0.01
    assert position_similarity(table, (2, 3)).shape == (2, 3, 2, 3)


@pytest.mark.parametrize("positions", ["none", "relative", "rotary"])
def test_no_table_without_added_positions(positions: str) -> None:
    assert find_position_table(vitrail.create("ViT-Ti/16", image_size=32, positions=positions, **TOY)) is None


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ResNet-20", {"stages": (1, 1)}),
        ("RegNetY-4GF", {"stages": (1, 1, 1, 1)}),
        (f"{EXAMPLE}:resmlp_tiny", {"depth": 1}),
    ],
)
def test_no_table_in_convnets_and_mixers(name: str, fields: dict[str, Any]) -> None:
    assert find_position_table(vitrail.create(name, **fields)) is None


def test_the_table_of_a_model_in_half_precision() -> None:
    table = find_position_table(vitrail.create("DeiT-Ti", image_size=32, **TOY).to(torch.bfloat16))
    assert table is not None
    assert table.dtype == np.float32


def test_tiles_are_arranged_like_patches() -> None:
    tiles = normal(2, 3, 4, 5)
    whole, middles, centers = tile_maps(tiles)
    assert (len(middles), len(centers)) == (2, 3)
    fine = 48 // 5
    for r, c in product(range(2), range(3)):
        top, left = round(middles[r] - (4 * fine - 1) / 2), round(centers[c] - (5 * fine - 1) / 2)
        tile = whole[top : top + 4 * fine, left : left + 5 * fine]
        assert np.array_equal(tile[::fine, ::fine], tiles[r, c])
        assert np.array_equal(tile[fine - 1 :: fine, fine - 1 :: fine], tiles[r, c])
    assert np.isfinite(whole).sum() == tiles.size * fine**2, "all else is a gap"
    assert whole.shape[0] == middles[-1] + (4 * fine - 1) / 2 + 1


@pytest.mark.parametrize("grid", [(2, 3), (14, 14), (1, 1), (1, 7), (9, 2), (3, 20)])
def test_figure(grid: tuple[int, int]) -> None:
    similarity = position_similarity(normal(grid[0] * grid[1], 8), grid)
    figure = draw_position_similarity(similarity)
    check_figure(figure, "patch column", "patch row", "cosine similarity")
    assert ("evenly spaced" in figure.caption) == (max(grid) > 16)
    assert ("too small to show" in figure.caption) == (min(grid) < 6)
    axes, bar = figure.draw().axes
    signed = similarity.min() < 0
    assert axes.images[0].get_clim() == (-int(signed), 1), (
        "0 is in the middle of the colors if there are negative values"
    )
    assert axes.images[0].get_cmap().name == (DIVERGING_MAP if signed else SEQUENTIAL_MAP)
    assert np.array_equal(figure.arrays["similarity"], similarity)
    assert "cosine similarity" in (bar.get_xlabel(), bar.get_ylabel())


def test_near_and_far_patches() -> None:
    """In a row of three patches, two pairs share an edge, and one pair does not."""
    similarity = np.array([[1, 0.5, -0.2], [0.5, 1, 0.7], [-0.2, 0.7, 1]]).reshape(1, 3, 1, 3)
    assert compare_near_and_far(similarity) == pytest.approx((0.6, -0.2))


def test_caption_says_how_many_tiles_are_shown() -> None:
    similarity = position_similarity(normal(3 * 20, 8), (3, 20))
    figure = draw_position_similarity(similarity)
    assert "3×16 evenly spaced tiles of 3×20 are shown" in figure.caption
    axes = figure.draw().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["0", "3", "5"]
