"""Toy models with every kind of attention, and attention without the fused kernel."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn

import vitrail
from vitrail.layers import attention as layers
from vitrail.models import cct

SIZE = (32, 48)  # a grid of 2 × 3 patches
VIT_FIELDS: dict[str, Any] = {"image_size": SIZE, "classes": 5, "depth": 3, "width": 16, "heads": 2}
TABLE_POSITIONS = ("learned", "learned_2d", "sincos", "sincos_2d")
ATTENTION_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{kind} {at}": ("vit", {"positions": kind, "positions_at": at})
        for kind in TABLE_POSITIONS
        for at in ("stem", "layers")
    },
    **{f"{kind} shared": ("vit", {"positions": kind, "positions_at": "shared"}) for kind in TABLE_POSITIONS},
    **{kind: ("vit", {"positions": kind}) for kind in ("none", "relative", "rotary")},
    **{
        f"{kind} with registers": ("vit", {"positions": kind, "registers": 2})
        for kind in ("learned", "relative", "rotary")
    },
    "registers without positions": ("vit", {"registers": 2, "prefix_positions": False}),
    "mean": ("vit", {"pool": "mean"}),
    "mean without class token": ("vit", {"pool": "mean", "class_token": False}),
    "mean, then norm": ("vit", {"pool": "mean_norm", "class_token": False}),
    "map": ("vit", {"pool": "map", "class_token": False}),
    "map with class token and registers": ("vit", {"pool": "map", "registers": 2}),
    "no bias, swiglu, layer scale": ("vit", {"qkv_bias": False, "activation": "swiglu", "layer_scale": 0.1}),
    "deit": ("deit", {}),
    "deit3": ("deit", {"layer_scale": 0.1, "prefix_positions": False}),
    "distilled": ("deit", {"distilled": True}),
    "distilled, class head": ("deit", {"distilled": True, "answer": "class"}),
    "distilled, distillation head": ("deit", {"distilled": True, "answer": "distill"}),
    "hybrid": ("hybrid", {}),
    "cct": ("cct", {}),
    "cct with neighbors": ("cct", {"neighbors": True, "published": False}),
    "cct, sinusoidal": ("cct", {"learned_positions": False}),
    "t2t": ("t2t", {"stage_width": 8}),
    "sl_vit": ("sl_vit", {"patch_size": 16}),
    "parallel": ("parallel_vit", {"layer_scale": 0.5}),
}

PRESETS = {
    "vit": "vit_tiny_patch16_224",
    "deit": "deit_tiny_patch16_224",
    "t2t": "t2t_vit_7",
    "sl_vit": "sl_vit_patch4_32",
    "parallel_vit": "vit_small_patch16_18x2_224",
}


def make_attention_model(case: str = "learned stem", **fields: Any) -> Any:
    """A toy model of 2 × 3 patches, with uneven attention and a head that is not zero."""
    family, own = ATTENTION_CASES[case]
    fields = {**VIT_FIELDS, **own, **fields}
    if family == "hybrid":
        model = vitrail.create("vit_base_r50_s16_224", stages=(1,), patch_size=4, **fields)
    elif family == "cct":
        model = cct.CCT(cct.CCTConfig(stem=(8, 8, 8), **fields))
    else:
        model = vitrail.create(PRESETS[family], **fields)
    return add_weight_noise(model, std=0.3)


def random_image_batch(count: int = 2, size: tuple[int, int] = SIZE, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(1))


def count_hooks(model: nn.Module) -> int:
    """The number of hooks on all modules of a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@contextmanager
def unfused_attention() -> Generator[list[Tensor]]:
    """Compute attention as weights @ v and collect the weights of each call, with gradients from autograd."""
    collected = list[Tensor]()

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        weights = layers.attention_weights(q, k, mask)
        if not weights.requires_grad:
            weights.requires_grad_()
        weights.retain_grad()
        collected.append(weights)
        return weights @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "attention", attention)
        patch.setattr(cct.LocalAttention, "attend", layers.SelfAttention.attend)  # calls the patched attention
        yield collected
