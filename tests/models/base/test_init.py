"""Initial values equal those of the ViT authors' code for every weight, also after a build on the meta device."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import vitrail
from vitrail.layers.attention import Attention
from vitrail.models.base.init import init_layers
from vitrail.models.vit import ViT

TOYS = {
    "vit": {"name": "vit_tiny_patch16_224", "image_size": 32, "patch_size": 8, "registers": 2, "layer_scale": 0.1},
    "vit map mlp": {
        "name": "vit_tiny_patch16_224",
        "image_size": 32,
        "pool": "map",
        "head": "mlp",
        "activation": "swiglu",
    },
    "vit relative": {"name": "vit_tiny_patch16_224", "image_size": 32, "positions": "relative"},
    "vit 2-D": {"name": "vit_tiny_patch16_224", "image_size": 32, "positions": "learned_2d", "positions_at": "layers"},
    "vit sincos": {"name": "vit_tiny_patch16_224", "image_size": 32, "positions": "sincos"},
    "deit": {"name": "deit_tiny_distilled_patch16_224", "image_size": 32, "initialization": "vit"},
    "hybrid": {"name": "vit_small_r26_s32_224", "image_size": 32},
}


def build(toy: str) -> Any:
    fields = dict(TOYS[toy])
    return vitrail.create(str(fields.pop("name")), depth=2, **fields)


@pytest.mark.parametrize("toy", TOYS)
def test_init_weights_fills_a_model_from_the_meta_device(toy: str) -> None:
    with torch.device("meta"):
        empty = build(toy)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        nn.init.constant_(parameter, math.nan)
    empty.init_weights()
    whole = build(toy)
    for (name, filled), built in zip(empty.named_parameters(), whole.parameters(), strict=True):
        assert filled.isfinite().all(), name
        if filled.numel() > 1000:
            torch.testing.assert_close(filled.std(), built.std(), rtol=0.1, atol=1e-7, msg=name)
    assert empty.state_dict().keys() == whole.state_dict().keys()
    images = torch.randn(1, 3, 32, 32)
    assert (empty(images) == 0).all(), "a head of zeros returns zeros"


def test_build_on_the_meta_device_does_not_import_the_compiler() -> None:
    builds = "[vitrail.create(toy.pop('name'), depth=2, **toy) for toy in toys]"
    program = f"import sys, torch, vitrail; torch.set_default_device('meta'); toys = {[*TOYS.values()]}; {builds}"
    check = "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{program}; {check}"], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", "importing the compiler would add more than a second to every load"


def bound(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def test_distributions() -> None:
    model = build("vit map mlp")
    assert isinstance(model, ViT)
    width = 192
    block: Any = model.blocks[0]
    for part in block.attn.qkv.weight.chunk(3):
        assert 0.98 < bound(part) / math.sqrt(6 / (width + width)) <= 1  # q, k and v are drawn separately
    assert 0.98 < bound(block.attn.proj.weight) / math.sqrt(6 / (2 * width)) <= 1
    assert 0.98 < bound(block.mlp.fc2.weight) / math.sqrt(6 / (4 * width + width)) <= 1
    assert bound(block.attn.qkv.bias) == 0
    assert 0 < bound(block.mlp.fc1.bias) < 1e-5
    kernel = model.patch_embed.proj.weight
    fan_in = kernel[0].numel()
    torch.testing.assert_close(kernel.std(), torch.tensor(1 / math.sqrt(fan_in)), rtol=0.02, atol=0)
    assert bound(kernel) <= 2 / math.sqrt(fan_in) / 0.87962566 * 1.001
    assert model.pos_embed is not None
    torch.testing.assert_close(model.pos_embed.std(), torch.tensor(0.02), rtol=0.1, atol=0)
    assert model.cls_token is not None
    assert bound(model.cls_token) == 0
    assert isinstance(model.head, nn.Linear)
    assert bound(model.head.weight) == bound(model.head.bias) == 0
    assert model.attn_pool is not None
    assert 0.9 < bound(model.attn_pool.latent) / math.sqrt(6 / (1 + width)) <= 1


def test_last_norm_of_a_bottleneck_starts_at_zero() -> None:
    norms = {name: module for name, module in build("hybrid").named_modules() if isinstance(module, nn.GroupNorm)}
    for name, norm in norms.items():
        assert bound(norm.weight) == (0 if name.endswith("norm3") else 1), name


def test_keys_and_values_are_initialized_separately() -> None:
    layer = Attention(64, 2, key_width=16, value_width=480)
    init_layers(layer)
    keys, values = layer.kv.weight.split((16, 480))
    assert 0.95 < bound(keys) / math.sqrt(6 / (64 + 16)) <= 1
    assert 0.95 < bound(values) / math.sqrt(6 / (64 + 480)) <= 1
