"""facebook's DeiT, DeiT-III and CaiT: {"model": …} with timm's names, but gamma_1 and gamma_2 for a block's factors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.layout import (
    IMAGENET_MEAN_STD,
    OWNER_FIXED_FIELDS,
    PATCH_FAMILIES,
    STEM_POSITION_VALUES,
    Layout,
    TranslatedCheckpoint,
    check_representable,
    find_heads_by_width,
    strip_prefixes,
    translate_checkpoint,
    write_renamed_tensors,
)
from vitrail.checkpoint.name_table import make_entry
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing

NAME_TABLE = (
    *timm.BASE_TABLE,
    make_entry("blocks.#.gamma_1", "blocks.#.ls1.gamma"),
    make_entry("blocks.#.gamma_2", "blocks.#.ls2.gamma"),
)
WRAPPED_CAIT_TABLE = tuple(
    make_entry([f"module.{name}" for name in row.theirs], row.ours, row.transform) for row in timm.CAIT_TABLE
)
HEADS_BY_WIDTH = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}  # by width, of DeiT and DeiT-III
SUPPORTED_VALUES = {
    "class_token": (True,),
    "registers": (0,),
    "pool": ("class",),
    "head": ("linear",),
    **STEM_POSITION_VALUES,
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: RawContents) -> bool:
    names = strip_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    others = {"fc_norm.weight", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = {"head.weight", "dist_token"} & names.keys() and not others & names.keys()
    cait = timm.CAIT_MARKER in names  # which timm has with the same names, but nothing around them
    wrapped = contents.wrapper in ("model", "model_ema") and (own or cait)
    hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    return (
        "patch_embed.proj.weight" in names
        and not hybrid
        and bool(wrapped or ("blocks.0.gamma_1" in names and not cait))
    )


def read(contents: RawContents, known: Mapping[str, Any]) -> TranslatedCheckpoint:
    timm.refuse_incompatible_model(contents.path.name)
    tensors = strip_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    cait = timm.CAIT_MARKER in tensors
    # facebook's own files hold nothing else; others used its code for other models, such as MoCo v3's with 12 heads
    training = bool(contents.other_keys) or cait
    return translate_checkpoint(
        contents,
        tensors,
        timm.CAIT_TABLE if cait else NAME_TABLE,
        layout="deit",
        family="cait" if cait else "deit",
        known={
            **({} if training else find_heads_by_width(tensors, "patch_embed.proj.weight", HEADS_BY_WIDTH)),
            **known,
        },
        policy="deit",
        preprocessing=make_preprocessing,
        fixed=OWNER_FIXED_FIELDS,
    )


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["image_size"]
    whole = max(size) > 224 or "class_depth" in config  # a CaiT sees all of a picture at any size
    return Preprocessing(image_size=size, crop=1.0 if whole else 0.875, **IMAGENET_MEAN_STD)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    table = WRAPPED_CAIT_TABLE if description.family == "cait" else NAME_TABLE
    check_representable(
        "deit", description.config, {} if table is WRAPPED_CAIT_TABLE else SUPPORTED_VALUES
    )  # shapes say all of a CaiT
    write_renamed_tensors("deit", tensors, table, description.config["heads"], path, wrapper="model")
    return timm.ASSUMED_FIELDS


LAYOUT = Layout(name="deit", matches=matches, read=read, write=write, families=(*PATCH_FAMILIES, "cait"))
