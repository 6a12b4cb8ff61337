"""The config of every preset is inferred from the shapes of its tensors."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.config_from_shapes import infer_config
from vitrail.models.catalog.families import find_preset

NOT_INFERRED = {
    "igpt_cpu",  # ours: its heads are in the config
    "vit_base_patch16_gap_224",  # 16 heads, unlike all others of this width; known from timm's file name
    *(
        name
        for kind in (
            "cct*",
            "linformer*",
            "axial*",
            "patch_merger*",
            "memory_vit*",
            "transformer*",
            "caption*",
            "lstm*",
        )
        for name in vitrail.list_models(kind)
    ),  # without a public layout
    *vitrail.list_models("simple_vit*"),  # its positions and activation are those of big_vision's files
    *(name for name in vitrail.list_models("*siglip*") if find_preset(name)[1].activation == "gelu_tanh"),
    *vitrail.list_models("eva02*"),  # their norm_eps is not the default, see tests/models/test_eva.py
    *vitrail.list_models("swinv2*"),  # their windows are not in the weights
    *vitrail.list_models("cvt_*_384"),  # there are no positions, which would tell the image size
    *("nest_base", "nest_small", "nest_tiny"),  # timm's constants; the public weights have others
    *vitrail.list_models("vit_huge_plus_patch16_dinov3*"),  # 20 heads; a ViT-H has the same shapes and 16
    "vit_7b_patch16_dinov3",
    *vitrail.list_models("tf_efficientnet*"),  # TensorFlow's padding and norms are not in the weights
    *vitrail.list_models("vit_halved*"),  # 12 heads; a ViT-S has the same shapes and 6
}
VIT, DEIT = (find_preset(name)[0] for name in ("ViT-Ti/16", "DeiT-Ti"))
NOT_IN_SHAPES = ("dropout", "attention_dropout", "stochastic_depth", "dynamic", "layer_scale", "norm_eps")


def make_tensors(name: str, **fields: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return vitrail.create(name, **fields).state_dict()


INFERRED = [name for name in vitrail.list_models() if name not in NOT_INFERRED]  # test_every_family.py has more


@pytest.mark.parametrize(
    "name", [each if n % 16 == 0 else pytest.param(each, marks=pytest.mark.slow) for n, each in enumerate(INFERRED)]
)
def test_presets_are_inferred_from_their_shapes(name: str) -> None:
    family, preset = find_preset(name)
    inferred = infer_config(make_tensors(name), family, {}).config
    start = {"layer_scale": preset.layer_scale} if hasattr(preset, "layer_scale") else {}
    config = family.configure(
        **{field: value for field, value in inferred.items() if field not in NOT_IN_SHAPES}, **start
    )
    assert config == preset
    assert (inferred.get("layer_scale") is None) == (asdict(preset).get("layer_scale") is None)


def test_heads_that_shapes_do_not_tell() -> None:
    tensors = make_tensors("ViT-Ti/16", width=48, heads=3)
    with pytest.raises(CheckpointError, match=r"number of heads for width 48; expected heads=…"):
        infer_config(tensors, VIT, {})
    assert infer_config(tensors, VIT, {"heads": 3}).config["heads"] == 3
    with pytest.raises(CheckpointError, match=r"number of heads for width 288; expected heads=…"):
        infer_config(
            make_tensors("ViT-Ti/16", width=288, heads=3), VIT, {}
        )  # the heads of a CaiT of this width do not count
    assert infer_config(make_tensors("ViT-Ti/16", width=128, heads=4), VIT, {}).config["heads"] == 2
    so400m = make_tensors("ViT-Ti/16", width=1152, depth=27, heads=16, mlp_width=4304)
    assert infer_config(so400m, VIT, {}).config["heads"] == 16


def test_parts_that_a_family_does_not_support_are_refused() -> None:
    wide = make_tensors("ViT-Ti/16", mlp_width=192)
    with pytest.raises(CheckpointError, match=r"an MLP of width 192, not 4 × 192, which the family 'deit' does not"):
        infer_config(wide, DEIT, {})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("patch_embed.proj.weight", None, r"patch_embed\.proj\.weight is missing"),
        ("patch_embed.proj.weight", (3, 4), r"has shape \(3, 4\); expected 4 dimensions"),
        ("blocks.0.mlp.fc1.weight", None, r"blocks\.0\.mlp\.fc1\.weight is missing"),
        ("pos_embed", (1, 8, 192), r"pos_embed has 8 rows, 1 of them for prefix tokens, .* not a square"),
        ("pos_embed", (8,), r"pos_embed has shape \(8,\)"),
    ],
)
def test_tensors_of_another_model_are_refused(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    tensors = make_tensors("ViT-Ti/16", depth=1)
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.empty(shape)
    with pytest.raises(CheckpointError, match=message):
        infer_config(tensors, VIT, {})
