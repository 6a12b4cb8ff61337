"""DeepViT: logits of the authors' code, re-attention by explicit sums, batch statistics, counts, files and errors."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layout_round_trip import assert_same_tensors, write_checkpoint
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from support.reference_logits import read_reference
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.checkpoint import read, write
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.deepvit import DeepViT, DeepViTConfig, ReAttention

TOY = DeepViTConfig(image_size=(16, 24), patch_size=8, width=16, depth=3, reattending=2, heads=2, classes=5)
CONV = replace(TOY, stem="convolutions", branch_scale=0.5)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)))


def make(config: DeepViTConfig = TOY, std: float = 0.2) -> Any:
    return randomize_batch_norms(add_weight_noise(DeepViT(config), std=std))


@pytest.mark.parametrize("name", ["deepvit_plain", "deepvit_s", "deepvit_l"])
@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    name: str, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, name)
    torch.save({"state_dict": reference.tensors, "epoch": 3}, tmp_path / "theirs.pth")
    found = read(tmp_path / "theirs.pth", scaled_maps=reference.config["transform_scale"])
    config = found.model.config
    assert (found.layout, found.description.family) == ("authors", "deepvit")
    assert (config.depth, config.reattending, config.heads, config.mlp_width) == (3, 2, 4, None)
    assert (config.patch_size, config.branch_scale) == ((8, 8), reference.config["scale_adjustment"])
    assert not found.report.assumed
    assert not found.report.warnings
    assert (found.model(reference.images) - reference.logits).abs().max() < 2e-5
    write_checkpoint(found, tmp_path / "own", "vitrail")
    again = read(tmp_path / "own")
    if config.scaled_maps:
        with pytest.warns(UserWarning, match="authors cannot store scaled_maps=True, and its readers use False"):
            write_checkpoint(again, tmp_path / "back.pth", "authors")
    else:
        write_checkpoint(again, tmp_path / "back.pth", "authors")
    back = torch.load(tmp_path / "back.pth", weights_only=True)["state_dict"]
    assert_same_tensors({k: v for k, v in back.items() if "num_batches" not in k}, reference.tensors)


@torch.no_grad()
def test_maps_are_mixed_after_the_softmax() -> None:
    layer = make(replace(TOY, scaled_maps=True)).blocks[2].attn
    x = torch.randn(1, 4, 16)
    q, k, v, _ = layer.project(x)
    soft = (q @ k.mT / math.sqrt(8)).softmax(-1)[0]  # (2, 4, 4)
    weight, norm = layer.reatten_matrix.weight[:, :, 0, 0], layer.var_norm
    expected = torch.empty(2, 4, 4)
    for head in range(2):
        mixed = layer.reatten_matrix.bias[head] + sum(weight[head, other] * soft[other] for other in range(2))
        centered = (mixed - norm.running_mean[head]) / (norm.running_var[head] + 1e-5).sqrt()
        expected[head] = (centered * norm.weight[head] + norm.bias[head]) / math.sqrt(8)
    torch.testing.assert_close(layer.weights(x)[0], expected)
    torch.testing.assert_close(layer(x)[0], layer.proj(torch.cat([expected[n] @ v[0, n] for n in range(2)], dim=-1)))
    torch.testing.assert_close(layer(x, queries=1), layer(x)[:, :1])
    assert (expected.sum(-1) - 1).abs().min() > 0.001


def test_statistics_in_training_are_those_of_all_rows() -> None:
    """The last block returns the class token alone, but its maps are normalized as if all tokens were computed."""
    model = make().train()
    layer, x = model.blocks[2].attn, torch.randn(3, 7, 16)
    torch.testing.assert_close(layer(x, queries=1), layer(x)[:, :1])
    before = layer.var_norm.running_mean.clone()
    model(images())
    assert not torch.equal(layer.var_norm.running_mean, before)
    assert torch.isfinite(layer.var_norm.running_var).all()


def test_only_the_last_blocks_reattend() -> None:
    model = make()
    assert [isinstance(block.attn, ReAttention) for block in model.blocks] == [False, True, True]
    assert all(isinstance(block.attn, ReAttention) for block in make(replace(TOY, reattending=None)).blocks)


@pytest.mark.parametrize("config", [TOY, CONV])
def test_shapes(config: DeepViTConfig) -> None:
    assert DeepViT(replace(config, classes=0)).eval()(images()).shape == (2, 16)
    model, x = make(config), images()
    torch.testing.assert_close(model(x), model.logits(model.tokens(x)))


def test_recomputed_activations_give_equal_gradients() -> None:
    model, x = make(CONV), images()
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for block in model.blocks:
        block.recompute = True
    model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_rollout_is_refused_with_the_reason_and_gradient_rollout_works(tmp_path: Path) -> None:
    model, how = make(replace(TOY, image_size=(16, 16))), Preprocessing(image_size=(16, 16))
    vitrail.save(model, tmp_path / "own", preprocessing=how)
    explainer = vitrail.Explainer(str(tmp_path / "own"))
    with pytest.raises(
        ConfigError, match="mixed after the softmax, so attention rows do not sum to 1; use 'grad-rollout'"
    ):
        explainer.explain("example:cat", method="rollout")
    assert explainer.explain("example:cat", method="grad-rollout").maps.shape[-2:] == (2, 2)
    assert explainer.explain("example:cat", method="attention", layer=0).maps.shape[-2:] == (2, 2)


def test_save_and_load_at_another_size(tmp_path: Path) -> None:
    model = make(CONV)
    write(model, tmp_path / "own")
    loaded = read(tmp_path / "own", image_size=(32, 48), classes=3)
    assert loaded.report.resized.keys() == {"pos_embed"}
    same = make(replace(CONV, dynamic=True))
    same.load_state_dict(model.state_dict())
    larger = images(32, 48)
    torch.testing.assert_close(loaded.model.tokens(larger), same.tokens(larger))
