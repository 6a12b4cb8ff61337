"""Parallel ViT: logits of the authors' code and of timm, branches by explicit sums, one layer to look at, and files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, write_checkpoint
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention, find_attention_layers
from vitrail.inspection.attention.rollout import attention_rollout
from vitrail.models.parallel_vit import ParallelViT, ParallelViTConfig
from vitrail.models.parts.token_merging import add_token_merging

TOY = ParallelViTConfig(image_size=(16, 24), patch_size=8, width=16, depth=2, heads=2, classes=5, layer_scale=0.5)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)))


@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, "parallel_ls")
    torch.save({"model": reference.tensors}, tmp_path / "theirs.pth")
    found = read(tmp_path / "theirs.pth", heads=4)
    config = found.model.config
    assert (found.layout, found.description.family) == ("deit", "parallel_vit")
    assert (config.depth, config.branches, config.prefix_positions, config.image_size) == (3, 2, False, (32, 32))
    assert not found.report.assumed
    assert (found.model(reference.images) - reference.logits).abs().max() < 2e-5
    write_checkpoint(found, tmp_path / "own", "vitrail")
    write_checkpoint(read(tmp_path / "own"), tmp_path / "back.pth", "deit")
    assert_same_tensors(torch.load(tmp_path / "back.pth", weights_only=True)["model"], reference.tensors)


@pytest.mark.parametrize("fields", [{}, {"no_embed_class": True, "init_values": None}])
def test_logits_are_those_of_timm_and_its_file_comes_back(fields: dict[str, Any], tmp_path: Path) -> None:
    toy = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    theirs: Any = add_weight_noise(timm.create_model("vit_small_patch16_18x2_224", **toy, **fields), std=0.2)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    found = check_round_trip(tmp_path / "theirs.pth", tmp_path / "back.pth", to="timm", heads=4)
    assert found.description.family == "parallel_vit"
    assert found.model.config.prefix_positions == (not fields)
    assert max_output_difference(found.model, theirs) <= 1e-5
    x = torch.randn(1, 3, 32, 32)
    (expected,) = theirs.forward_intermediates(x, indices=1, intermediates_only=True)
    torch.testing.assert_close(found.model.feature_maps(x)[0], expected, atol=1e-5, rtol=0)


def test_timm_opens_our_folder(tmp_path: Path) -> None:
    model = add_weight_noise(ParallelViT(replace(TOY, image_size=(16, 16), prefix_positions=False)))
    vitrail.save(model, tmp_path / "folder", to="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, theirs, (16, 16)) <= 1e-5


@torch.no_grad()
def test_a_block_adds_its_branches() -> None:
    model: Any = add_weight_noise(ParallelViT(replace(TOY, branches=3)), std=0.3)
    block, x = model.blocks[0], torch.randn(2, 5, 16)
    after = x.clone()
    for branch in block.attns.branches:
        after += branch.ls.gamma * branch.attn(branch.norm(x))
    expected = after.clone()
    for branch in block.ffns:
        expected += branch.ls.gamma * branch.mlp(branch.norm(after))
    torch.testing.assert_close(block(x), expected)
    torch.testing.assert_close(block(x, queries=1), expected[:, :1])


@torch.no_grad()
def test_the_branches_of_a_block_are_one_layer() -> None:
    """Rollout averages over the heads of both, as if each branch were half of the attention."""
    model: Any = add_weight_noise(ParallelViT(TOY), std=0.3)
    assert [layer.heads for layer in find_attention_layers(model)] == [4, 4]
    x = images()
    with capture_attention(model) as captured:
        model(x)
    assert [maps.shape for maps in captured.maps] == [(2, 4, 7, 7)] * 2
    first = model.blocks[0].attns.branches
    tokens, _ = model.embed(x)
    expected = torch.cat([branch.attn.weights(branch.norm(tokens)) for branch in first], dim=1)
    torch.testing.assert_close(captured.maps[0], expected)
    rolled = attention_rollout([maps[0].numpy() for maps in captured.maps])
    means = [(maps[0].mean(0) + torch.eye(7)) / 2 for maps in captured.maps]
    torch.testing.assert_close(torch.from_numpy(rolled).float(), means[1] @ means[0])


def test_gradients_of_attention_reach_both_branches() -> None:
    model = add_weight_noise(ParallelViT(TOY), std=0.3)
    with capture_attention(model, gradients=True) as captured:
        score = model(images()).square().sum()
        gradients = captured.compute_gradients(score)
    assert all(gradient.shape == (2, 4, 7, 7) for gradient in gradients)
    assert all(gradients[0][:, head].any() for head in range(4))


def test_recomputed_activations_give_equal_gradients() -> None:
    model: Any = add_weight_noise(ParallelViT(TOY), std=0.2)
    x = images()
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.any() for gradient in expected)
    model.zero_grad()
    for block in model.blocks:
        block.recompute = True
    model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_initial_weights_are_those_of_the_authors() -> None:
    torch.manual_seed(0)
    model: Any = vitrail.create("deit_small_patch16_18x2_LS", depth=1)
    branch = model.blocks[0].attns.branches[1]
    assert branch.ls.gamma.unique().tolist() == [pytest.approx(1e-4)]
    assert branch.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not branch.attn.qkv.bias.any()
    assert not model.head.weight.any()


def test_save_and_load_at_another_size(tmp_path: Path) -> None:
    model = add_weight_noise(ParallelViT(replace(TOY, prefix_positions=False)))
    write(model, tmp_path / "own")
    loaded = read(tmp_path / "own", image_size=(32, 48), classes=3)
    assert loaded.report.resized.keys() == {"pos_embed"}
    same = add_weight_noise(ParallelViT(replace(TOY, prefix_positions=False, dynamic=True)))
    same.load_state_dict(model.state_dict())
    larger = images(32, 48)
    torch.testing.assert_close(loaded.model.tokens(larger), same.tokens(larger))


def test_what_is_not_possible_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="branches is 3, which timm cannot represent; expected 2"):
        write(ParallelViT(replace(TOY, branches=3)), tmp_path / "theirs.pth", "timm")
    with pytest.raises(CheckpointError, match="prefix_positions is True, which deit cannot represent"):
        write(ParallelViT(TOY), tmp_path / "theirs.pth", "deit")
    with pytest.raises(ConfigError, match="ParallelViT has its own kind of blocks, so that it cannot merge tokens"):
        add_token_merging(ParallelViT(TOY), 1)
