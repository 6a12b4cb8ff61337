"""CaiT: talking heads equal explicit sums, the late class token, initial weights, and errors."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.checkpoint import load, read, write
from vitrail.models.cait import PRESETS, CaiT, CaiTConfig, TalkingHeads
from vitrail.tasks.classification import Classification
from vitrail.train.optim import freeze_all_but_last_blocks, list_weights

TOY = CaiTConfig(image_size=(16, 24), patch_size=8, width=16, depth=3, heads=2, classes=5, layer_scale=0.1)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)))


@torch.no_grad()
def test_talking_heads_equal_the_paper() -> None:
    """J = softmax(l(q·kᵀ/√K)), y = w(J)·v, with loops."""
    layer = add_weight_noise(TalkingHeads(8, 2), std=0.5).double()
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    q, k, v, _ = layer.project(x)  # (1, 2, 3, 4)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    raw = {(h, i, j): float(q[0, h, i] @ k[0, h, j]) / math.sqrt(4) for h in range(2) for i, j in pairs}
    before, after = layer.proj_l, layer.proj_w
    scores = {
        (g, i, j): float(before.bias[g]) + sum(float(before.weight[g, h]) * raw[h, i, j] for h in range(2))
        for g in range(2)
        for i, j in pairs
    }
    soft = {
        (g, i, j): math.exp(scores[g, i, j]) / sum(math.exp(scores[g, i, other]) for other in range(3))
        for g in range(2)
        for i, j in pairs
    }
    mixed = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    for g in range(2):
        for i, j in pairs:
            mixed[0, g, i, j] = float(after.bias[g]) + sum(float(after.weight[g, h]) * soft[h, i, j] for h in range(2))
    torch.testing.assert_close(layer.weights(x), mixed)
    expected = layer.proj(torch.cat([mixed[0, g] @ v[0, g] for g in range(2)], dim=-1))
    torch.testing.assert_close(layer(x)[0], expected)
    assert (mixed.sum(-1) - 1).abs().min() > 0.01  # rows do not sum to 1


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_masks_hide_tokens(kind: str) -> None:
    layer = add_weight_noise(TalkingHeads(8, 2), std=0.5)
    x = torch.randn(2, 4, 8)
    hidden = torch.tensor([True, True, True, False])
    mask = hidden if kind == "boolean" else torch.zeros(4).masked_fill(~hidden, -math.inf)
    changed = torch.cat([x[:, :3], torch.randn(2, 1, 8)], dim=1)
    without = layer.weights(x, mask=mask) - layer.proj_w.bias[:, None, None]
    assert without[..., 3].abs().max() <= 1e-6
    torch.testing.assert_close(layer.weights(changed, mask=mask)[..., :3, :3], layer.weights(x, mask=mask)[..., :3, :3])


def test_patches_do_not_attend_to_the_class_token() -> None:
    model = add_weight_noise(CaiT(TOY), std=0.2)
    x = images()
    before = model.tokens(x)
    with torch.no_grad():
        model.cls_token.add_(torch.randn(16))  # a constant would be removed by the norm
    after = model.tokens(x)
    assert torch.equal(before[:, 1:], after[:, 1:])
    assert not torch.allclose(before[:, 0], after[:, 0])


def test_shapes() -> None:
    model = CaiT(TOY).eval()
    assert (model.grid, model.prefix) == ((2, 3), 1)
    assert model.tokens(images()).shape == (2, 7, 16)
    assert model.encode(images(), queries=1).shape == (2, 1, 16)
    assert CaiT(replace(TOY, classes=0))(images()).shape == (2, 16)
    add_weight_noise(model)
    x = images()
    torch.testing.assert_close(model(x), model.logits(model.tokens(x)))


def test_dropout_and_stochastic_depth_act_in_the_blocks_of_patches() -> None:
    model: Any = add_weight_noise(CaiT(replace(TOY, stochastic_depth=0.3, attention_dropout=0.5)))
    assert [block.drop_path.rate for block in model.blocks] == [0.3] * 3
    layer = model.blocks[0].attn
    assert isinstance(layer, TalkingHeads)
    x = torch.randn(1, 6, 16)
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.weights(x), layer.weights(x))


def test_initial_weights_are_those_of_the_authors() -> None:
    torch.manual_seed(0)
    model: Any = CaiT(replace(PRESETS["cait_s36_384"], depth=2, image_size=224))
    assert model.blocks[0].ls1.gamma.unique().tolist() == [pytest.approx(1e-6)]
    assert model.blocks_token_only[1].ls2.gamma.unique().tolist() == [pytest.approx(1e-6)]
    for tensor in (
        model.blocks[0].attn.qkv.weight,
        model.blocks_token_only[0].attn.kv.weight,
        model.blocks[1].mlp.fc1.weight,
        model.pos_embed,
        model.head.weight,
    ):
        assert tensor.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[0].attn.proj_l.weight.std().item() == pytest.approx(0.02, rel=0.4)
    assert not model.blocks[0].mlp.fc1.bias.any()
    assert not CaiT(TOY).get_parameter("head.weight").any(), "in a config the field is off"


def test_presets_have_aliases_as_in_the_paper() -> None:
    assert vitrail.create("CaiT-XXS24", depth=1, class_depth=1).config.width == 192
    assert len(PRESETS) == 10
    assert all(config.width // config.heads == 48 for config in PRESETS.values())


def test_dynamic_sizes() -> None:
    model = add_weight_noise(CaiT(replace(TOY, dynamic=True)))
    assert model.tokens(images(32, 16)).shape == (2, 9, 16)
    larger = add_weight_noise(CaiT(TOY))
    with pytest.raises(ConfigError, match=r"32×16 pixels; expected 16×24, which the model was built for"):
        larger(images(32, 16))
    with pytest.raises(ConfigError, match=r"20×24 pixels; expected a multiple of 8×8"):
        model(images(20, 24))


def test_save_and_load_at_another_size(tmp_path: Path) -> None:
    model = add_weight_noise(CaiT(TOY))
    write(model, tmp_path / "ours")
    back = load(tmp_path / "ours")
    x = images()
    assert back.config == TOY
    assert torch.equal(back(x), model(x))
    loaded = read(tmp_path / "ours", image_size=(32, 48), classes=3)
    assert loaded.report.resized.keys() == {"pos_embed"}
    assert loaded.model.tokens(images(32, 48)).shape == (2, 25, 16)
    same = add_weight_noise(CaiT(replace(TOY, dynamic=True)))
    same.load_state_dict(model.state_dict())
    larger = images(32, 48)
    torch.testing.assert_close(loaded.model.tokens(larger), same.tokens(larger))


def test_layer_decay_levels() -> None:
    model: Any = CaiT(TOY)
    levels = {weight.name: weight.level for weight in list_weights(model)}
    assert {levels[name] for name in ("cls_token", "pos_embed", "patch_embed.proj.weight")} == {0}
    assert [levels[f"blocks.{n}.norm1.weight"] for n in range(3)] == [1, 2, 3]
    assert [levels[f"blocks_token_only.{n}.attn.kv.weight"] for n in range(2)] == [4, 5]
    assert levels["norm.weight"] == levels["head.weight"] == 6
    freeze_all_but_last_blocks(Classification(model), 1)
    trained = {name.split(".")[0] for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert trained == {"blocks_token_only", "norm", "head"}
    assert not model.blocks_token_only[0].norm1.weight.requires_grad


def test_recomputed_activations_give_equal_gradients() -> None:
    model: Any = add_weight_noise(CaiT(TOY), std=0.2)
    x = images()
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for block in model.blocks:
        block.recompute = True
    model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
