"""MoCo v3: {"state_dict": …} of a training run, of which the base encoder is read, or of a linear probe.

Its ViT-S has 12 heads, others have 6. A probe, or the output of its authors' convert_to_deit.py, has the names of any
ViT and is recognised by its fixed position table.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.name_table import make_entry
from vitrail.checkpoint.sincos_tables import is_sincos_table
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError

HEADS_BY_WIDTH = {384: 12, 768: 12, 1024: 16, 1280: 16}
ENCODER_PREFIX = "base_encoder."  # next to momentum_encoder. and predictor.
PATCH_KERNEL = "patch_embed.proj.weight"
SUPPORTED_VALUES = {
    "class_token": (True,),
    "registers": (0,),
    "distilled": (False,),
    "pool": ("class",),
    "head": ("linear",),
    **layout.STEM_POSITION_VALUES,
    "layer_scale": (None,),
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    if ENCODER_PREFIX + PATCH_KERNEL in names:
        return True
    kernel = names.get(PATCH_KERNEL)
    known_width = kernel is not None and kernel.ndim == 4 and kernel.shape[0] in HEADS_BY_WIDTH
    return known_width and is_sincos_table(names.get("pos_embed"), columns_first=False)


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Read the encoder without its projector, or the probe with its head."""
    tensors, ignored = layout.strip_common_prefixes(contents.tensors, "module."), list[str]()
    if ENCODER_PREFIX + PATCH_KERNEL in tensors:
        ignored = [n for n in tensors if not n.startswith(ENCODER_PREFIX) or n.startswith(f"{ENCODER_PREFIX}head.")]
        tensors = {n.removeprefix(ENCODER_PREFIX): each for n, each in tensors.items() if n not in ignored}
    model = layout.UntranslatedModel(
        layout="moco",
        family="vit",
        tensors=tensors,
        table=timm.BASE_TABLE,
        known={**layout.find_heads_by_width(tensors, PATCH_KERNEL, HEADS_BY_WIDTH), **known},
        policy="deit",
        preprocessing=make_preprocessing,
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return replace(layout.translate_checkpoint(contents, model), ignored=tuple(ignored))


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """As its authors evaluate a probe."""
    return Preprocessing(
        image_size=config["image_size"], crop=0.875, interpolation="bilinear", **layout.IMAGENET_MEAN_STD
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write the base encoder, or, with a head, a probe that is recognised by its position table."""
    config = description.config
    layout.check_representable("moco", config, SUPPORTED_VALUES)
    layout.check_representable("moco", config, {"heads": (HEADS_BY_WIDTH.get(config["width"], config["heads"]),)})
    if config["classes"] and not (
        is_sincos_table(tensors.get("pos_embed"), columns_first=False) and config["width"] in HEADS_BY_WIDTH
    ):
        raise CheckpointError(
            f"moco can store {config['classes']} classes only with its own position table; expected 0 classes"
        )
    prefix = "module." if config["classes"] else f"module.{ENCODER_PREFIX}"
    renamed = layout.add_zero_prefix_positions(tensors, config, 1)
    table = [make_entry([prefix + name for name in row.theirs], row.ours, row.transform) for row in timm.BASE_TABLE]
    layout.rename_and_write_tensors("moco", renamed, table, config["heads"], path, wrapper="state_dict")
    return timm.ASSUMED_FIELDS


LAYOUT = layout.Layout(name="moco", matches=matches, read=read, write=write, families=layout.PATCH_FAMILIES)
