"""DINO's backbones and whole runs, of which the teacher is taken; and DINOv2's, with registers and SwiGLU."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import (
    FIXED,
    IMAGENET,
    OWNER_NAMED,
    PATCHES_ALONE,
    TABLE_AT_STEM,
    Found,
    Layout,
    found,
    holds,
    own_heads,
    stripped,
    with_prefix_rows,
    with_register_rows,
    without_register_rows,
    write_table,
)
from vitrail.checkpoint.names import entry
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing

TABLE = (entry("register_tokens", "reg_token"), *timm.TABLE)
SWIGLU = (
    entry("blocks.#.mlp.w12.*", "blocks.#.mlp.fc1.*"),
    entry("blocks.#.mlp.w3.*", "blocks.#.mlp.fc2.*"),
    *TABLE,
)
PROJECTION = r"mask_token|head\..*|dino_head\..*|ibot_head\..*"  # what training needs beside the backbone
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1536: 24}  # by width, of DINO, iBOT and DINOv2: 64 channels per head
PUBLISHED = re.compile(r"dino(v2)?_(deit|vit).*_pretrain")  # names of the published files
ONLY = {
    "class_token": (True,),
    "pool": ("class",),
    "classes": (0,),
    "distilled": (False,),
    **TABLE_AT_STEM,
    "head": ("linear",),
    "activation": ("gelu", "gelu_tanh", "swiglu"),
}


def backbone(contents: Contents) -> dict[str, Tensor]:
    """The names of the backbone alone; blocks that training kept in chunks are numbered through."""
    tensors = stripped(contents.tensors, *timm.PREFIXES)
    if "backbone.patch_embed.proj.weight" in tensors:
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name): tensor for name, tensor in tensors.items()}


def marks(names: Mapping[str, object]) -> set[str]:
    """Tensors that only DINOv2 has."""
    return {"mask_token", "register_tokens"} & names.keys()


def matches(contents: Contents) -> bool:
    names = backbone(contents)
    second = marks(names)
    other = {"decoder_embed.weight", "head.weight"} & names.keys()
    own = contents.wrapper == "teacher" or (second and not other)
    others = ("head", "dist_token", "reg_token", "fc_norm", "attn_pool", "patch_embed.backbone", "blocks_token_only")
    flat = contents.kind == "pickle" and not contents.wrapper and not any(name.startswith(others) for name in names)
    return "patch_embed.proj.weight" in names and bool(own or flat)


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    tensors = {name: tensor for name, tensor in backbone(contents).items() if not re.fullmatch(PROJECTION, name)}
    warnings = []
    if "head.weight" in backbone(contents):
        warnings.append("it has a head of classes, which DINO's files have not: left out")
    ours = bool(known.get(OWNER_NAMED)) or contents.wrapper == "teacher" or bool(marks(backbone(contents)))
    ours = ours or PUBLISHED.match(contents.path.name) is not None  # any other backbone may not be DINO's
    if "register_tokens" in tensors and "pos_embed" in tensors:
        tensors["pos_embed"] = with_register_rows(tensors["pos_embed"], tensors["register_tokens"])
    left = [name for name in contents.tensors if re.search(rf"(^|\.)({PROJECTION})$", name)]
    result = found(
        contents,
        tensors,
        SWIGLU,
        layout="dino",
        family="vit",
        known={**(own_heads(tensors, "patch_embed.proj.weight", HEADS) if ours else {}), **known},
        policy="timm" if "register_tokens" in tensors else "dino",  # theirs with registers is antialiased
        preprocessing=preprocessing,
        warnings=warnings,
        fixed=FIXED if ours else (),
        assumed_preprocessing=not ours,
    )
    return replace(result, ignored=tuple(left))


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["image_size"]
    return Preprocessing(image_size=size, crop=0.875 if max(size) <= 256 else 1.0, **IMAGENET)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config = description.config
    holds("dino", config, ONLY)
    renamed = without_register_rows("dino", with_prefix_rows(tensors, config, 1 + config.get("registers", 0)), config)
    write_table("dino", renamed, SWIGLU if config.get("activation") == "swiglu" else TABLE, config["heads"], path)
    return timm.ASSUMES


LAYOUT = Layout(name="dino", matches=matches, read=read, write=write, families=PATCHES_ALONE)
