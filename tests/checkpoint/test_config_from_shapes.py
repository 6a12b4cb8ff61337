"""The config from shapes alone: every preset is found again in its own tensors."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

import vitrail
from vitrail.checkpoint.config_from_shapes import infer_config
from vitrail.errors import CheckpointError
from vitrail.models.catalog import find_preset

UNSEEN = {
    "vit_base_patch16_gap_224",  # 16 heads, as no other model of this width: timm's file names tell
    *(name for kind in ("cct*", "linformer*", "axial*") for name in vitrail.list_models(kind)),  # of no public layout
    *vitrail.list_models("t2t*"),  # their layout finds them
}
GUESSED = ("dropout", "attention_dropout", "stochastic_depth", "dynamic", "layer_scale", "norm_eps")


def tensors_of(name: str, **fields: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return vitrail.create(name, **fields).state_dict()


@pytest.mark.parametrize("name", [name for name in vitrail.list_models() if name not in UNSEEN][::4])
def test_presets_are_found_again(name: str) -> None:
    family, preset = find_preset(name)
    found, _ = infer_config(tensors_of(name), family.name, {})
    start = {"layer_scale": preset.layer_scale} if hasattr(preset, "layer_scale") else {}
    again = family.configure(**{field: value for field, value in found.items() if field not in GUESSED}, **start)
    assert again == preset
    assert (found.get("layer_scale") is None) == (asdict(preset).get("layer_scale") is None)


def test_what_only_the_user_knows() -> None:
    tensors = tensors_of("ViT-Ti/16", width=48, heads=3)
    with pytest.raises(CheckpointError, match=r"how many heads share its width of 48; expected heads=…"):
        infer_config(tensors, "vit", {})
    assert infer_config(tensors, "vit", {"heads": 3})[0]["heads"] == 3
    with pytest.raises(CheckpointError, match=r"how many heads share its width of 288; expected heads=…"):
        infer_config(tensors_of("ViT-Ti/16", width=288, heads=3), "vit", {})  # a CaiT's heads say nothing of a ViT's
    assert infer_config(tensors_of("ViT-Ti/16", width=128, heads=4), "vit", {})[0]["heads"] == 2
    so400m = tensors_of("ViT-Ti/16", width=1152, depth=27, heads=16, mlp_width=4304)
    assert infer_config(so400m, "vit", {})[0]["heads"] == 16


def test_a_family_that_has_no_place_for_it() -> None:
    wide = tensors_of("ViT-Ti/16", mlp_width=192)
    with pytest.raises(CheckpointError, match=r"an MLP of 192, not 4 times 192, which the family 'deit' has not"):
        infer_config(wide, "deit", {})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("patch_embed.proj.weight", None, r"patch_embed\.proj\.weight is not there"),
        ("patch_embed.proj.weight", (3, 4), r"is of shape \(3, 4\); expected 4 dimensions"),
        ("blocks.0.mlp.fc1.weight", None, r"blocks\.0\.mlp\.fc1\.weight is not there"),
        ("pos_embed", (1, 8, 192), r"pos_embed has 8 rows, 1 of them before the patches, which are not a square"),
        ("pos_embed", (8,), r"pos_embed is of shape \(8,\)"),
    ],
)
def test_no_vision_transformer(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    tensors = tensors_of("ViT-Ti/16", depth=1)
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.empty(shape)
    with pytest.raises(CheckpointError, match=message):
        infer_config(tensors, "vit", {})
