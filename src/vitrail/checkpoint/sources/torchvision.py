"""torchvision's vit_b_16 and its like, also files from before its MLP was renamed; and its ResNets.

A ResNet has the names that timm gives it too: a file of one is taken for timm's unless it is said to be torchvision's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.convnets import RESNET, family_in
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import (
    IMAGENET,
    TABLE_AT_STEM,
    TRANSFORMERS,
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

RESNET_ONLY = {"stem": ("imagenet",), "shortcut": ("projection",), "channels": (3,), "width": (64,)}


def matches(contents: Contents) -> bool:
    return "encoder.pos_embedding" in stripped(contents.tensors, "module.")


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    tensors = stripped(contents.tensors, "module.")
    resnet = family_in(tensors) == "resnet"
    return found(
        contents,
        tensors,
        tuple(map(entry, RESNET, RESNET)) if resnet else TABLE,
        layout="torchvision",
        family="resnet" if resnet else "vit",
        known=known,
        policy="torchvision",
        preprocessing=preprocessing,
    )


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """What its transforms do: weights above 224 pixels are SWAG's, and vit_l_16 was evaluated from 242."""
    size = config["image_size"]
    large = max(size) > 224
    crop = 224 / 242 if config["width"] == 1024 and config.get("patch_size") == (16, 16) else 0.875
    return Preprocessing(
        image_size=size, crop=1.0 if large else crop, interpolation="bicubic" if large else "bilinear", **IMAGENET
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config = description.config
    if description.family == "resnet":
        holds("torchvision", config, RESNET_ONLY)
        write_table("torchvision", tensors, tuple(map(entry, RESNET, RESNET)), 1, path)
        return {}
    holds("torchvision", config, ONLY)
    write_table("torchvision", with_prefix_rows(tensors, config, 1), TABLE, config["heads"], path)
    return {"activation": "gelu", "norm_eps": 1e-6}


LAYOUT = Layout(name="torchvision", matches=matches, read=read, write=write, families=(*TRANSFORMERS, "resnet"))
