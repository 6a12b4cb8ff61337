"""SL-ViT: logits of the authors' code, shifted copies and attention by explicit sums, counts, files and errors."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layout_round_trip import assert_same_tensors, write_checkpoint
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import load, read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.sl_vit import SLViT, SLViTConfig, add_shifted_copies, infer_patch

TOY = SLViTConfig(image_size=(16, 24), patch_size=8, width=16, depth=2, heads=2, classes=5)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)))


@pytest.mark.parametrize("name", ["sl_vit", "sl_vit_spt", "sl_vit_lsa"])
@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    name: str, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, name)
    torch.save({"model_state_dict": reference.tensors, "epoch": 3}, tmp_path / "theirs.pth")
    found = read(tmp_path / "theirs.pth", heads=reference.config["heads"])
    config = found.model.config
    assert (found.layout, found.description.family) == ("authors", "sl_vit")
    assert (config.shifted_patches, config.local_attention) == (
        reference.config["is_SPT"],
        reference.config["is_LSA"],
    )
    assert (config.depth, config.heads, config.mlp_width, config.patch_size) == (3, 4, None, (8, 8))
    assert not found.report.assumed
    assert not found.report.warnings
    assert (found.model(reference.images) - reference.logits).abs().max() < 2e-5
    write_checkpoint(found, tmp_path / "own", "vitrail")
    write_checkpoint(read(tmp_path / "own"), tmp_path / "back.pth", "authors")
    back = torch.load(tmp_path / "back.pth", weights_only=True)["model_state_dict"]
    assert_same_tensors(back, reference.tensors)


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("SL-ViT", {}, 2_729_878),
        ("SL-ViT", {"local_attention": False}, 2_729_770),
        ("SL-ViT", {"shifted_patches": False}, 2_692_534),
        ("SL-ViT", {"local_attention": False, "shifted_patches": False}, 2_692_426),
        ("SL-ViT", {"classes": 100}, 2_747_248),
        ("sl_vit_patch8_64", {}, 2_906_228),
    ],
)
def test_parameters_of_the_authors(name: str, fields: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = vitrail.create(name, **fields)
    assert sum(weight.numel() for weight in model.parameters()) == count


def test_copies_are_shifted_diagonally_and_zeros_enter() -> None:
    x = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    found = add_shifted_copies(x, (2, 4))[0]
    assert found.shape == (5, 4, 4)
    assert torch.equal(found[0], x[0, 0])
    for copy, (a, b) in zip(found[1:], [(-1, -2), (-1, 2), (1, -2), (1, 2)], strict=True):
        for row in range(4):
            for column in range(4):
                inside = 0 <= row + a < 4 and 0 <= column + b < 4
                expected = float(x[0, 0, row + a, column + b]) if inside else 0.0
                assert float(copy[row, column]) == expected


@torch.no_grad()
def test_no_token_attends_to_itself_and_heads_learn_their_scale() -> None:
    model: Any = add_weight_noise(SLViT(TOY), std=0.3)
    layer, x = model.blocks[0].attn, torch.randn(1, 4, 16)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)[:, 0]
    heads = list[Tensor]()
    for head in range(2):
        scores = q[head] @ k[head].T * layer.scale[head]
        scores.fill_diagonal_(-math.inf)
        heads.append(scores.softmax(-1))
    torch.testing.assert_close(layer.weights(x)[0], torch.stack(heads))
    torch.testing.assert_close(layer(x)[0], layer.proj(torch.cat([heads[n] @ v[n] for n in range(2)], dim=-1)))
    torch.testing.assert_close(layer(x, queries=1), layer(x)[:, :1])
    with capture_attention(model) as captured:
        model(images())
    for maps in captured.maps:
        assert maps.diagonal(dim1=2, dim2=3).abs().max() == 0
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:3]))


def test_masks_are_joined() -> None:
    layer: Any = add_weight_noise(SLViT(TOY), std=0.3).blocks[0].attn
    seen = torch.tensor([True, True, True, False])
    for mask in (seen, torch.zeros(4).masked_fill(~seen, -math.inf)):
        weights = layer.weights(torch.randn(1, 4, 16), mask=mask)
        assert weights[..., 3].abs().max() == 0
        assert weights.diagonal(dim1=2, dim2=3).abs().max() == 0


def test_shapes() -> None:
    model = SLViT(TOY)
    assert SLViT(replace(TOY, classes=0))(images()).shape == (2, 16)
    add_weight_noise(model, std=0.2).train()
    x = images()
    torch.testing.assert_close(model(x), model.logits(model.tokens(x)))


def test_initial_weights_are_those_of_the_authors() -> None:
    torch.manual_seed(0)
    model: Any = SLViT(replace(SLViTConfig(), depth=2))
    assert model.blocks[1].attn.scale.unique().tolist() == [0.25]
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx(math.sqrt(2 / (4 * 192)), rel=0.02)
    assert model.pos_embed.std().item() == pytest.approx(1.0, rel=0.02)
    assert not model.head.weight.any()


def test_stochastic_depth_is_the_same_in_every_block() -> None:
    model: Any = SLViT(replace(TOY, stochastic_depth=0.1))
    assert [block.drop_path.rate for block in model.blocks] == [0.1, 0.1]


def test_another_size_is_resampled_and_another_patch_refused(tmp_path: Path) -> None:
    model = add_weight_noise(SLViT(TOY))
    write(model, tmp_path / "own")
    loaded = read(tmp_path / "own", image_size=(32, 48), classes=3)
    assert loaded.report.resized.keys() == {"pos_embed"}
    same = add_weight_noise(SLViT(replace(TOY, dynamic=True)))
    same.load_state_dict(model.state_dict())
    larger = images(32, 48)
    torch.testing.assert_close(loaded.model.tokens(larger), same.tokens(larger))
    with pytest.raises(CheckpointError, match=r"patch_embed\.norm\.weight cannot be adapted to shape \(240,\)"):
        load(tmp_path / "own", patch_size=4)


def test_heads_without_local_attention_follow_from_the_published_width(tmp_path: Path) -> None:
    model = vitrail.create("SL-ViT", local_attention=False, depth=1)
    vitrail.save(model, tmp_path / "theirs.pth", to="authors")
    found = read(tmp_path / "theirs.pth")
    assert found.model.config == model.config
    assert not found.report.assumed


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    assert infer_patch(48) == ((4, 4), 3)
    assert infer_patch(49) == ((7, 7), 1)
    with pytest.raises(CheckpointError, match="a patch of 50 numbers; expected a square of pixels"):
        infer_patch(50)
