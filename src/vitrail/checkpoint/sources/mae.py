"""MAE: the encoder, maybe with its decoder, which is left; or fine-tuned, with a norm after the mean of the patches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.fixed_tables import is_table
from vitrail.checkpoint.layout import (
    FIXED,
    OWNER_NAMED,
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
from vitrail.checkpoint.sources import deit, timm

HEADS = {768: 12, 1024: 16, 1280: 16}  # by width
DECODER = r"mask_token|decoder_.*"
ONLY = {
    "class_token": (True,),
    "registers": (0,),
    "pool": ("class", "mean_norm"),
    "layer_scale": (None,),
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "distilled": (False,),
    "prefix_positions": (True,),
    **TABLE_AT_STEM,
    "head": ("linear",),
    "activation": ("gelu", "gelu_tanh"),
}


def matches(contents: Contents) -> bool:
    names = stripped(contents.tensors, *timm.PREFIXES)
    tuned = "fc_norm.weight" in names and "norm.weight" not in names
    own = "decoder_embed.weight" in names or (contents.wrapper == "model" and ("head.weight" not in names or tuned))
    others = {"dist_token", "blocks.0.gamma_1", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    return "patch_embed.proj.weight" in names and own and not hybrid and not others & names.keys()


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    tensors = stripped(contents.tensors, *timm.PREFIXES)
    ours = bool(known.get(OWNER_NAMED)) or "norm.weight" not in tensors or "decoder_embed.weight" in tensors
    ours = ours or is_table(tensors.get("pos_embed"), columns_first=True)
    return found(
        contents,
        tensors,
        timm.PLAIN,
        layout="mae",
        family="vit",
        known={**(own_heads(tensors, "patch_embed.proj.weight", HEADS) if ours else {}), **known},
        policy="deit",
        preprocessing=deit.preprocessing,
        fixed=FIXED if ours else (),
        assumed_preprocessing=not ours,
        ignore=DECODER,
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """The encoder, or the fine-tuned model; a decoder is not part of ours."""
    holds("mae", description.config, ONLY)
    write_table("mae", tensors, timm.PLAIN, description.config["heads"], path, wrapper="model")
    return timm.ASSUMES


LAYOUT = Layout(name="mae", matches=matches, read=read, write=write, families=PATCHES_ALONE)
