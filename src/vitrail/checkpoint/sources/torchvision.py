"""torchvision's vit_b_16 and its like, also files from before its MLP was renamed; its ResNets and RegNetYs.

A ResNet has the names that timm gives it too: a file of one is taken for timm's unless it is said to be torchvision's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.convnets import RESNET, family_in, norm
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import (
    FIXED,
    IMAGENET,
    TABLE_AT_STEM,
    TRANSFORMERS,
    Found,
    Layout,
    found,
    holds,
    own_heads,
    stripped,
    with_prefix_rows,
    write_table,
)
from vitrail.checkpoint.names import Entry, entry
from vitrail.data.preprocessing import Preprocessing

HEADS = {768: 12, 1024: 16, 1280: 16}  # by width, of its ViTs
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

RESNET_ONLY = {
    "stem": ("imagenet",),
    "shortcut": ("projection",),
    "channels": (3,),
    "width": (64,),
    "number of stages": (4,),
}
OUR_BLOCK, THEIR_BLOCK = re.compile(r"s(\d+)\.b(\d+)\."), re.compile(r"trunk_output\.block(\d+)\.block\1-(\d+)\.")


def regnety_table(block: str) -> tuple[Entry, ...]:
    """With what a block's names begin with on both sides; how the two count blocks, no table says."""
    parts = {"f.a": "conv1", "f.b": "conv2", "f.c": "conv3", "proj": "downsample"}
    both = {"stem": "stem"} | {f"{block}{theirs}": f"{block}{ours}" for theirs, ours in parts.items()}
    norms = [
        pair for theirs, ours in both.items() for pair in zip(norm(f"{theirs}.1"), norm(f"{ours}.bn"), strict=True)
    ]
    return (
        *(entry(f"{theirs}.0.weight", f"{ours}.conv.weight") for theirs, ours in both.items()),
        *(entry(theirs, ours) for theirs, ours in norms),
        *(entry(f"{block}f.se.fc{n}.*", f"{block}se.fc{n}.*") for n in (1, 2)),
        entry("fc.*", "head.fc.*"),
    )


TABLES = {"vit": TABLE, "resnet": tuple(map(entry, RESNET, RESNET)), "regnety": regnety_table("s#.b#.")}


def matches(contents: Contents) -> bool:
    names = stripped(contents.tensors, "module.")
    return "encoder.pos_embedding" in names or any(map(THEIR_BLOCK.match, names))


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    tensors = stripped(contents.tensors, "module.")
    family = "regnety" if any(map(THEIR_BLOCK.match, tensors)) else family_in(tensors) or "vit"
    return found(
        contents,
        {THEIR_BLOCK.sub(lambda m: f"s{m[1]}.b{int(m[2]) + 1}.", name): each for name, each in tensors.items()},
        TABLES[family],
        layout="torchvision",
        family=family,
        known={**own_heads(tensors, "conv_proj.weight", HEADS), **known},
        policy="torchvision",
        preprocessing=preprocessing,
        fixed=FIXED,
    )


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """What its transforms do: weights above 224 pixels are SWAG's, and vit_l_16 was evaluated from 242."""
    size = config["image_size"]
    large = max(size) > 224
    crop = 224 / 242 if config.get("width") == 1024 and config.get("patch_size") == (16, 16) else 0.875
    return Preprocessing(
        image_size=size, crop=1.0 if large else crop, interpolation="bicubic" if large else "bilinear", **IMAGENET
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config = description.config
    if description.family == "resnet":
        holds("torchvision", {**config, "number of stages": len(config["stages"])}, RESNET_ONLY)
        write_table("torchvision", tensors, TABLES["resnet"], 1, path)
        return {}
    if description.family == "regnety":
        holds("torchvision", config, {"channels": (3,)})
        places = {name: OUR_BLOCK.sub(their_block, name) for name in tensors}
        table = regnety_table("trunk_output.block#.block#-#.")
        write_table("torchvision", {places[name]: each for name, each in tensors.items()}, table, 1, path)
        return {}
    holds("torchvision", config, ONLY)
    write_table("torchvision", with_prefix_rows(tensors, config, 1), TABLE, config["heads"], path)
    return {"activation": "gelu", "norm_eps": 1e-6}


def their_block(ours: re.Match[str]) -> str:
    return f"trunk_output.block{ours[1]}.block{ours[1]}-{int(ours[2]) - 1}."


LAYOUT = Layout(
    name="torchvision", matches=matches, read=read, write=write, families=(*TRANSFORMERS, "resnet", "regnety")
)
