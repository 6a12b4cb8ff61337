"""facebook's DeiT, DeiT-III and CaiT: {"model": …} with timm's names, but gamma_1 and gamma_2 for a block's factors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import (
    FIXED,
    IMAGENET,
    PATCHES_ALONE,
    TABLE_AT_STEM,
    Found,
    Layout,
    found,
    holds,
    own_heads,
    stripped,
    write_table,
)
from vitrail.checkpoint.names import entry
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing

TABLE = (
    *timm.PLAIN,
    entry("blocks.#.gamma_1", "blocks.#.ls1.gamma"),
    entry("blocks.#.gamma_2", "blocks.#.ls2.gamma"),
)
CAIT = tuple(entry([f"module.{name}" for name in row.theirs], row.ours, row.form) for row in timm.CAIT)
HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}  # by width, of DeiT and DeiT-III
ONLY = {
    "class_token": (True,),
    "registers": (0,),
    "pool": ("class",),
    "head": ("linear",),
    **TABLE_AT_STEM,
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: Contents) -> bool:
    names = stripped(contents.tensors, *timm.PREFIXES)
    others = {"fc_norm.weight", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = {"head.weight", "dist_token"} & names.keys() and not others & names.keys()
    cait = timm.CAIT_MARK in names  # which timm has with the same names, but nothing around them
    wrapped = contents.wrapper in ("model", "model_ema") and (own or cait)
    hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    return (
        "patch_embed.proj.weight" in names
        and not hybrid
        and bool(wrapped or ("blocks.0.gamma_1" in names and not cait))
    )


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    timm.refuse_others(contents.path.name)
    tensors = stripped(contents.tensors, *timm.PREFIXES)
    cait = timm.CAIT_MARK in tensors
    # facebook's own files hold nothing else; others used its code for other models, such as MoCo v3's with 12 heads
    training = bool(contents.others) or cait
    return found(
        contents,
        tensors,
        timm.CAIT if cait else TABLE,
        layout="deit",
        family="cait" if cait else "deit",
        known={**({} if training else own_heads(tensors, "patch_embed.proj.weight", HEADS)), **known},
        policy="deit",
        preprocessing=preprocessing,
        fixed=FIXED,
    )


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["image_size"]
    whole = max(size) > 224 or "class_depth" in config  # a CaiT sees all of a picture at any size
    return Preprocessing(image_size=size, crop=1.0 if whole else 0.875, **IMAGENET)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    table = CAIT if description.family == "cait" else TABLE
    holds("deit", description.config, {} if table is CAIT else ONLY)  # shapes say all of a CaiT
    write_table("deit", tensors, table, description.config["heads"], path, wrapper="model")
    return timm.ASSUMES


LAYOUT = Layout(name="deit", matches=matches, read=read, write=write, families=(*PATCHES_ALONE, "cait"))
