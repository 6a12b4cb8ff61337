"""MoCo v3: {"state_dict": …} of a training, from which the base encoder is read; or of a linear probe on it.

Its ViT-S has 12 heads where others have 6. A probe, or the output of its authors' convert_to_deit.py, has the
names of any ViT and is recognised by its fixed table of positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.fixed_tables import is_table
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
    with_prefix_rows,
    write_table,
)
from vitrail.checkpoint.names import Entry
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError

HEADS = {384: 12, 768: 12, 1024: 16, 1280: 16}  # by width
ENCODER = "base_encoder."  # next to momentum_encoder. and predictor.
KERNEL = "patch_embed.proj.weight"
ONLY = {
    "class_token": (True,),
    "registers": (0,),
    "distilled": (False,),
    "pool": ("class",),
    "head": ("linear",),
    **TABLE_AT_STEM,
    "layer_scale": (None,),
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: Contents) -> bool:
    names = stripped(contents.tensors, "module.")
    if ENCODER + KERNEL in names:
        return True
    kernel = names.get(KERNEL)
    wide = kernel is not None and kernel.ndim == 4 and kernel.shape[0] in HEADS
    return wide and is_table(names.get("pos_embed"), columns_first=False)


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    """The encoder without its projector, or the probe with its head."""
    names = stripped(contents.tensors, "module.")
    if ENCODER + KERNEL in names:
        inside = {n.removeprefix(ENCODER): each for n, each in names.items() if n.startswith(ENCODER)}
        tensors = {name: each for name, each in inside.items() if not name.startswith("head.")}
    else:
        tensors = names
    ignored = tuple(name for name in names if name.removeprefix(ENCODER) not in tensors or not name.startswith(ENCODER))
    result = found(
        contents,
        tensors,
        timm.PLAIN,
        layout="moco",
        family="vit",
        known={**own_heads(tensors, KERNEL, HEADS), **known},
        policy="deit",
        preprocessing=preprocessing,
        fixed=FIXED,
    )
    return replace(result, ignored=ignored if tensors is not names else ())


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing with which its authors evaluate a probe."""
    return Preprocessing(image_size=config["image_size"], crop=0.875, interpolation="bilinear", **IMAGENET)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Writes the base encoder alone, or with a head a probe, recognised by its table of positions."""
    config = description.config
    holds("moco", config, ONLY)
    holds("moco", config, {"heads": (HEADS.get(config["width"], config["heads"]),)})
    if config["classes"] and not (is_table(tensors.get("pos_embed"), columns_first=False) and config["width"] in HEADS):
        raise CheckpointError(
            f"moco holds {config['classes']} classes only with its own table of positions; expected 0"
        )
    before = "module." if config["classes"] else f"module.{ENCODER}"
    rows = with_prefix_rows(tensors, config, 1)
    table = tuple(Entry(tuple(before + name for name in row.theirs), row.ours, row.form) for row in timm.PLAIN)
    write_table("moco", rows, table, config["heads"], path, wrapper="state_dict")
    return timm.ASSUMES


LAYOUT = Layout(name="moco", matches=matches, read=read, write=write, families=PATCHES_ALONE)
