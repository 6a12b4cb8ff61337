"""facebook's DeiT, DeiT-III and CaiT: {"model": …} with timm's names, but gamma_1 and gamma_2 for LayerScale."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
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
HEADS_BY_WIDTH = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}  # of DeiT and DeiT-III
SUPPORTED_VALUES = {
    "class_token": (True,),
    "registers": (0,),
    "pool": ("class",),
    "head": ("linear",),
    **layout.STEM_POSITION_VALUES,
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    others = {"fc_norm.weight", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = {"head.weight", "dist_token"} & names.keys() and not others & names.keys()
    cait = timm.CAIT_MARKER in names  # timm has the same names without a wrapper
    wrapped = contents.wrapper in ("model", "model_ema") and (own or cait)
    hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    return (
        "patch_embed.proj.weight" in names
        and not hybrid
        and bool(wrapped or ("blocks.0.gamma_1" in names and not cait))
    )


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    timm.refuse_incompatible_model(contents.path.name)
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    cait = timm.CAIT_MARKER in tensors
    # facebook's files have no other keys; others used its code for other models, such as MoCo v3 with 12 heads
    published = not contents.other_keys and not cait
    heads = layout.find_heads_by_width(tensors, "patch_embed.proj.weight", HEADS_BY_WIDTH) if published else {}
    model = layout.UntranslatedModel(
        layout="deit",
        family="cait" if cait else "deit",
        tensors=tensors,
        table=timm.CAIT_TABLE if cait else NAME_TABLE,
        known={**heads, **known},
        policy="deit",
        preprocessing=make_preprocessing,
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["image_size"]
    uncropped = max(size) > 224 or "class_depth" in config  # CaiT does not crop at any size
    return Preprocessing(image_size=size, crop=1.0 if uncropped else 0.875, **layout.IMAGENET_MEAN_STD)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    cait = description.family == "cait"
    table = WRAPPED_CAIT_TABLE if cait else NAME_TABLE
    layout.check_representable(
        "deit", description.config, {} if cait else SUPPORTED_VALUES
    )  # shapes tell all about a CaiT
    layout.rename_and_write_tensors("deit", tensors, table, description.config["heads"], path, wrapper="model")
    return timm.ASSUMED_FIELDS


LAYOUT = layout.Layout(name="deit", matches=matches, read=read, write=write, families=(*layout.PATCH_FAMILIES, "cait"))
