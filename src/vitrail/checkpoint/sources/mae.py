"""MAE: the encoder, maybe with its decoder, which is left; or fine-tuned, with a norm after the mean of the patches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import TABLE_AT_STEM, Found, Layout, found, holds, stripped, write_table
from vitrail.checkpoint.sources import deit, timm

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
    return "patch_embed.proj.weight" in names and own and not others & names.keys()


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    return found(
        contents,
        stripped(contents.tensors, *timm.PREFIXES),
        timm.PLAIN,
        layout="mae",
        family="vit",
        known=known,
        policy="deit",
        preprocessing=deit.preprocessing,
        ignore=DECODER,
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """The encoder, or the fine-tuned model; a decoder is not part of ours."""
    holds("mae", description.config, ONLY)
    write_table("mae", tensors, timm.PLAIN, description.config["heads"], path, wrapper="model")
    return timm.ASSUMES


LAYOUT = Layout(name="mae", matches=matches, read=read, write=write)
