"""CrossFormer: the authors' logits, groups and biases by explicit loops, files both ways, inspection, errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.layout_round_trip import check_round_trip
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.inspection.attention.capture import capture_attention
from vitrail.layers.attention import SelfAttention
from vitrail.models.crossformer import ComputedBias, CrossFormer, CrossFormerConfig, GroupAttention, split_width

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = CrossFormerConfig(
    image_size=(64, 48),
    kernels=(4, 8),
    stages=(2, 4),
    widths=(16, 32),
    heads=(2, 4),
    windows=(4, 3),
    intervals=(3, 2),
    classes=5,
)


def toy(**fields: Any) -> CrossFormer:
    return add_weight_noise(CrossFormer(replace(TOY, **fields)))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 48)))


@pytest.mark.parametrize("name", ["crossformer", "crossformer_padded", "crossformer_pp"])
@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    name: str, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, name)
    theirs = reference.config
    torch.save({"model": reference.tensors}, tmp_path / "theirs.pth")
    check_round_trip(tmp_path / "theirs.pth", tmp_path / "back.pth", to="authors")
    groups = {"windows": theirs["group_size"], "intervals": theirs["crs_interval"]}
    found = read(tmp_path / "theirs.pth", image_size=theirs["img_size"], **groups)
    config = found.model.config
    assert (config.stages, config.heads, config.kernels, config.merge_kernels) == (
        *(tuple(theirs[key]) for key in ("depths", "num_heads", "patch_size")),
        (2, 4),
    )
    assert config.cooling == theirs["use_acl"]
    assert found.report.assumed.keys() == {"windows", "intervals"}
    assert (found.model(reference.images) - reference.logits).abs().max() <= 2e-5


@torch.no_grad()
def test_bias_is_that_of_the_offset_from_key_to_query() -> None:
    """vit-pytorch looks up other offsets: (0, 0) has the bias of (−2, 2)."""
    bias = add_weight_noise(ComputedBias(4, 2), std=0.5)
    found = bias((2, 3)).unflatten(1, (2, 3)).unflatten(3, (2, 3))  # (H, query row, column, key row, column)
    for row, column, key_row, key_column in np.ndindex(2, 3, 2, 3):
        offset = torch.tensor([row - key_row, column - key_column], dtype=torch.float32)
        expected = bias.pos3(bias.pos2(bias.pos1(bias.pos_proj(offset))))
        torch.testing.assert_close(found[:, row, column, key_row, key_column], expected)


@pytest.mark.parametrize("grid", [(12, 12), (7, 13), (5, 9)])
@torch.no_grad()
def test_odd_blocks_attend_to_every_third_token(grid: tuple[int, int]) -> None:
    """Groups of 4×4 at an interval of 3 in parts of 12×12; what the grid does not have is left out."""
    layer = add_weight_noise(GroupAttention(16, 2, 4, 3), std=0.3)
    plain = SelfAttention(16, 2)
    plain.load_state_dict({name: each for name, each in layer.state_dict().items() if "position" not in name})
    x = torch.randn(2, *grid, 16)
    found = layer(x.flatten(1, 2), grid).unflatten(1, grid)
    bias = layer.get_submodule("position_bias")((4, 4)).unflatten(1, (4, 4)).unflatten(3, (4, 4))
    for top in range(0, grid[0], 12):
        for left in range(0, grid[1], 12):
            for row in range(top, min(top + 3, grid[0])):
                for column in range(left, min(left + 3, grid[1])):
                    places = np.s_[:, row : top + 12 : 3, column : left + 12 : 3]
                    part = x[places]
                    h, w = part.shape[1:3]
                    mask = bias[:, :h, :w, :h, :w].flatten(3, 4).flatten(1, 2)
                    expected = plain(part.flatten(1, 2), mask=mask)
                    torch.testing.assert_close(found[places].flatten(1, 2), expected)


@torch.no_grad()
def test_a_grid_not_larger_than_a_group_is_one_group() -> None:
    layer = add_weight_noise(GroupAttention(16, 2, 4, 3), std=0.3)
    maps = layer.weights(torch.randn(2, 24, 16), (4, 6))
    assert maps.shape == (2, 2, 24, 24)
    assert maps.min() > 0


def test_width_is_shared_between_kernels() -> None:
    assert split_width(64, 4) == [32, 16, 8, 8]
    assert split_width(64, 2) == [32, 32]
    assert split_width(64, 1) == [64]


def test_initial_weights_rates_and_gradients() -> None:
    torch.manual_seed(0)
    model: Any = CrossFormer(replace(TOY, stochastic_depth=0.5, cooling=True))
    rates = [block.drop_path.rate for stage in model.layers for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert model.layers[1].blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    model = toy(cooling=True, widths=(64, 128)).train()
    model(images(56, 40)).square().sum().backward()  # some groups are padding alone
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"60×48 pixels; expected a multiple of 8×8"):
        toy()(images(60, 48))


def test_other_sizes_groups_and_classes_on_load(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path / "own")
    found = read(tmp_path / "own", image_size=(32, 96), windows=(3, 3), intervals=(2, 1), classes=3)
    assert not found.report.resized  # biases are computed
    assert found.model(images(32, 96)).shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"widths is \(16, 32\) in the checkpoint"):
        read(tmp_path / "own", widths=(16, 64))


PHOTO = np.random.default_rng(0).random((60, 60, 3))


def test_maps_of_groups() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=(64, 48)))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    shapes = [tuple(each.shape) for each in captured.maps]
    assert shapes[:3] == [(12, 2, 16, 16), (18, 2, 16, 16), (6, 4, 9, 9)]
    for weights in captured.maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    far = subject.explain(PHOTO, "attention", layer=1, token="7,2").map
    expected = np.zeros((16, 12), bool)
    expected[1:12:3, 2:12:3] = True  # 12×12 tokens hold nine groups
    assert np.array_equal(far > 0, expected)
    changes = "the grid changes from 16×12 to 8×6 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")


def test_figures() -> None:
    photos = [np.random.default_rng(n).random((60, 60, 3)) for n in range(2)]
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=(64, 48)))
    figures = vitrail.look(subject, photos)
    assert {each.name for each in figures.figures} >= {"attention_distance", "patch_pca"}
    distances = figures["attention_distance"].arrays["distances"]
    assert np.nanmax(distances[0]) < np.nanmin(distances[1])  # tokens at an interval are farther apart
