"""A model that `write` accepts loads with the same outputs; a model that it refuses leaves no file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise, randomize_batch_norms

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.family_recognition import get_family
from vitrail.checkpoint.layout import list_layouts

TINY: dict[str, Any] = {"image_size": 32, "width": 32, "depth": 1, "heads": 2, "classes": 3}
VIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "no head": {"classes": 0},
    "mean": {"pool": "mean"},
    "mean norm": {"pool": "mean_norm"},
    "map": {"pool": "map", "class_token": False},
    "no class token": {"pool": "mean", "class_token": False},
    "registers": {"registers": 2, "classes": 0},
    "registers without positions": {"registers": 2, "prefix_positions": False, "classes": 0},
    "no class position": {"prefix_positions": False},
    "layer scale": {"layer_scale": 0.1},
    "layer scale, no head": {"layer_scale": 0.1, "classes": 0},
    "tanh layer": {"head": "mlp"},
    "tanh layer, no head": {"head": "mlp", "classes": 0},
    "no bias": {"qkv_bias": False},
    "narrow": {"mlp_width": 48},
    "swiglu": {"activation": "swiglu", "mlp_width": 88, "classes": 0, "layer_scale": 0.1},
    "tanh": {"activation": "gelu_tanh"},
    "oblong": {"image_size": (32, 48)},
    "oblong with a square's places": {"image_size": (16, 64)},
    "fixed": {"positions": "sincos_2d"},
    "simple": {"positions": "sincos_simple", "class_token": False, "pool": "mean", "head": "mlp"},
    "simple with a class token": {"positions": "sincos_simple"},
    **{positions: {"positions": positions} for positions in ("none", "learned_2d", "relative", "rotary")},
    "in layers": {"positions_at": "layers"},
    "gray": {"channels": 1},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"vit, {name}": ("ViT-Ti/16", {**TINY, **fields}) for name, fields in VIT.items()},
    "deit": ("DeiT-Ti", TINY),
    "deit distilled": ("DeiT-Ti-distilled", TINY),
    "deit distilled, no head": ("DeiT-Ti-distilled", {**TINY, "classes": 0}),
    "deit III": ("DeiT-Ti", {**TINY, "layer_scale": 0.1, "prefix_positions": False}),
    "hybrid": ("R50+ViT-B/16", {**TINY, "stages": (1, 1, 1)}),
    "hybrid of a root": ("R50+ViT-B/16", {**TINY, "stages": (), "patch_size": 4}),
    "cait": ("cait_xxs24_224", {**TINY, "class_depth": 1}),
    "t2t": ("t2t_vit_7", TINY),
    "sl_vit": ("SL-ViT", TINY),
    "sl_vit, patches alone": ("SL-ViT", {**TINY, "shifted_patches": False}),
    "sl_vit, plain": ("SL-ViT", {**TINY, "shifted_patches": False, "local_attention": False, "channels": 1}),
    "parallel_vit": ("vit_small_patch16_18x2_224", TINY),
    "parallel_vit of the authors": ("deit_small_patch16_18x2_LS", TINY),
    "parallel_vit without layer scale": ("deit_small_patch16_18x2", TINY),
    "parallel_vit, three branches": ("vit_small_patch16_18x2_224", {**TINY, "branches": 3}),
    "deepvit": ("DeepViT-16B", TINY),
    "deepvit with convolutions": ("DeepViT-L", {**TINY, "depth": 2, "reattending": 1}),
    "crossvit": (
        "CrossViT-S",
        {
            "image_size": 32,
            "patch_sizes": (8, 16),
            "scales": (1.0, 1.0),
            "widths": (8, 16),
            "heads": (2, 2),
            "classes": 3,
        },
    ),
    "igpt": ("igpt_cpu", {"image_size": 6, "width": 32, "depth": 2, "heads": 2, "colors": 9}),
    "igpt with a head": ("igpt_cpu", {"image_size": 6, "width": 32, "depth": 1, "heads": 2, "classes": 3}),
    "resnet": ("resnet18", {"image_size": 32, "stages": (1, 1), "width": 8, "classes": 3}),
    "resnet for CIFAR": (
        "resnet18",
        {"stem": "cifar", "shortcut": "padding", "image_size": 32, "stages": (1, 1, 1), "width": 16, "classes": 10},
    ),
}
SUFFIXES = {"google": (".npz",), "hf": ("",), "imagegpt": ("",), "timm": (".pth", ".safetensors", ""), "vitrail": ("",)}
GIVEN_FIELDS = ("heads", "activation", "norm_eps", "pool", "positions", "constants")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*(cannot store|written, but)")
def test_every_layout_gives_the_same_outputs_or_refuses(name: str, tmp_path: Path) -> None:
    preset, fields = MODELS[name]
    torch.manual_seed(0)
    model = randomize_batch_norms(add_weight_noise(vitrail.create(preset, **fields))).eval()
    config = asdict(model.config)
    images = torch.randn(2, config["channels"], *model.config.image_size)
    with torch.no_grad():
        expected = model(images)
    written = 0
    for layout in (each.name for each in list_layouts()):
        for suffix in SUFFIXES.get(layout, (".pth", ".safetensors")):
            path = tmp_path / f"{layout}{suffix}"
            try:
                write(model, path, layout)
            except CheckpointError:
                assert not path.exists(), f"{layout} left {path.name}"
                continue
            source = layout if layout == "t2t_by_width" else None
            with torch.no_grad():
                assert torch.allclose(compute_outputs(path, source, config, images), expected, atol=1e-4), path.name
            written += 1
    assert written, "our own layout supports all models"


def compute_outputs(path: Path, source: str | None, config: dict[str, Any], images: torch.Tensor) -> torch.Tensor:
    """Outputs of the loaded model, with the fields that its file cannot store given if its family has them."""
    said = {"trained_size": config["image_size"], **{name: config[name] for name in ("heads",) if name in config}}
    family = get_family(vitrail.describe(path, source=source, **said), str(path))
    names = family.config.__dataclass_fields__
    known = {name: config[name] for name in GIVEN_FIELDS if name in config and name in names}
    return read(path, source=source, trained_size=config["image_size"], **known).model(images)
