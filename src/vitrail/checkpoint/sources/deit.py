"""facebook's DeiT and DeiT-III: {"model": …} with timm's names, but gamma_1 and gamma_2 for a block's factors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import IMAGENET, TABLE_AT_STEM, Found, Layout, found, holds, stripped, write_table
from vitrail.checkpoint.names import entry
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing

TABLE = (
    *timm.PLAIN,
    entry("blocks.#.gamma_1", "blocks.#.ls1.gamma"),
    entry("blocks.#.gamma_2", "blocks.#.ls2.gamma"),
)
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
    wrapped = contents.wrapper in ("model", "model_ema") and own
    return "patch_embed.proj.weight" in names and bool(wrapped or "blocks.0.gamma_1" in names)


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    timm.refuse_others(contents.path.name)
    return found(
        contents,
        stripped(contents.tensors, *timm.PREFIXES),
        TABLE,
        layout="deit",
        family="deit",
        known=known,
        policy="deit",
        preprocessing=preprocessing,
    )


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["image_size"]
    return Preprocessing(image_size=size, crop=0.875 if max(size) <= 224 else 1.0, **IMAGENET)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    holds("deit", description.config, ONLY)
    write_table("deit", tensors, TABLE, description.config["heads"], path, wrapper="model")
    return timm.ASSUMES


LAYOUT = Layout(name="deit", matches=matches, read=read, write=write)
