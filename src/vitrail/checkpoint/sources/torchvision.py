"""torchvision's vit_b_16 and its like; also files from before its MLP was renamed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import (
    IMAGENET,
    TABLE_AT_STEM,
    Found,
    Layout,
    found,
    holds,
    stripped,
    with_prefix_rows,
    write_table,
)
from vitrail.checkpoint.names import entry
from vitrail.data.preprocessing import Preprocessing

LAYER = "encoder.layers.encoder_layer_#."
TABLE = (
    entry("class_token", "cls_token"),
    entry("conv_proj.*", "patch_embed.proj.*"),
    entry("encoder.pos_embedding", "pos_embed"),
    entry(f"{LAYER}ln_1.*", "blocks.#.norm1.*"),
    entry(f"{LAYER}self_attention.in_proj_*", "blocks.#.attn.qkv.*"),
    entry(f"{LAYER}self_attention.out_proj.*", "blocks.#.attn.proj.*"),
    entry(f"{LAYER}ln_2.*", "blocks.#.norm2.*"),
    entry(f"{LAYER}mlp.0.*", "blocks.#.mlp.fc1.*"),
    entry(f"{LAYER}mlp.3.*", "blocks.#.mlp.fc2.*"),
    entry(f"{LAYER}mlp.linear_1.*", "blocks.#.mlp.fc1.*"),
    entry(f"{LAYER}mlp.linear_2.*", "blocks.#.mlp.fc2.*"),
    entry("encoder.ln.*", "norm.*"),
    entry("heads.pre_logits.*", "pre_logits.*"),
    entry("heads.head.*", "head.*"),
)
ONLY = {
    "class_token": (True,),
    "registers": (0,),
    "distilled": (False,),
    "pool": ("class",),
    **TABLE_AT_STEM,
    "layer_scale": (None,),
    "qkv_bias": (True,),
    "channels": (3,),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: Contents) -> bool:
    return "encoder.pos_embedding" in stripped(contents.tensors, "module.")


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    return found(
        contents,
        stripped(contents.tensors, "module."),
        TABLE,
        layout="torchvision",
        family="vit",
        known=known,
        policy="torchvision",
        preprocessing=preprocessing,
    )


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """What its transforms do: weights above 224 pixels are SWAG's, and vit_l_16 was evaluated from 242."""
    size = config["image_size"]
    large = max(size) > 224
    crop = 224 / 242 if config["width"] == 1024 and config["patch_size"] == (16, 16) else 0.875
    return Preprocessing(
        image_size=size, crop=1.0 if large else crop, interpolation="bicubic" if large else "bilinear", **IMAGENET
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config = description.config
    holds("torchvision", config, ONLY)
    write_table("torchvision", with_prefix_rows(tensors, config, 1), TABLE, config["heads"], path)
    return {"activation": "gelu", "norm_eps": 1e-6}


LAYOUT = Layout(name="torchvision", matches=matches, read=read, write=write)
