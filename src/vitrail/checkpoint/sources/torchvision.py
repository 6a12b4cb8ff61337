"""torchvision's ViTs, also from before their MLP was renamed; its ResNets and RegNetYs.

A ResNet has the same names in timm: a file is read as timm's unless the user names torchvision.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.convnet_tensors import RESNET_NAMES, find_convnet_family, list_batch_norm_names
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.name_table import NameEntry, make_entry
from vitrail.data.preprocessing import Preprocessing

HEADS_BY_WIDTH = {768: 12, 1024: 16, 1280: 16}  # of its ViTs
LAYER_PREFIX = "encoder.layers.encoder_layer_#."
NAME_TABLE = (
    make_entry("class_token", "cls_token"),
    make_entry("conv_proj.*", "patch_embed.proj.*"),
    make_entry("encoder.pos_embedding", "pos_embed"),
    make_entry(f"{LAYER_PREFIX}ln_1.*", "blocks.#.norm1.*"),
    make_entry(f"{LAYER_PREFIX}self_attention.in_proj_*", "blocks.#.attn.qkv.*"),
    make_entry(f"{LAYER_PREFIX}self_attention.out_proj.*", "blocks.#.attn.proj.*"),
    make_entry(f"{LAYER_PREFIX}ln_2.*", "blocks.#.norm2.*"),
    make_entry(f"{LAYER_PREFIX}mlp.0.*", "blocks.#.mlp.fc1.*"),
    make_entry(f"{LAYER_PREFIX}mlp.3.*", "blocks.#.mlp.fc2.*"),
    make_entry(f"{LAYER_PREFIX}mlp.linear_1.*", "blocks.#.mlp.fc1.*"),
    make_entry(f"{LAYER_PREFIX}mlp.linear_2.*", "blocks.#.mlp.fc2.*"),
    make_entry("encoder.ln.*", "norm.*"),
    make_entry("heads.pre_logits.*", "pre_logits.*"),
    make_entry("heads.head.*", "head.*"),
)
SUPPORTED_VALUES = {
    "class_token": (True,),
    "registers": (0,),
    "distilled": (False,),
    "pool": ("class",),
    **layout.STEM_POSITION_VALUES,
    "layer_scale": (None,),
    "qkv_bias": (True,),
    "channels": (3,),
    "activation": ("gelu", "gelu_tanh"),
}

RESNET_SUPPORTED_VALUES = {
    "stem": ("imagenet",),
    "shortcut": ("projection",),
    "channels": (3,),
    "width": (64,),
    "number of stages": (4,),
}
OUR_BLOCK_PATTERN = re.compile(r"s(\d+)\.b(\d+)\.")
THEIR_BLOCK_PATTERN = re.compile(r"trunk_output\.block(\d+)\.block\1-(\d+)\.")


def make_regnety_table(block: str) -> tuple[NameEntry, ...]:
    """Table with the same prefix for a block on both sides; block numbers are converted outside the table."""
    parts = {"f.a": "conv1", "f.b": "conv2", "f.c": "conv3", "proj": "downsample"}
    both = {"stem": "stem"} | {f"{block}{theirs}": f"{block}{ours}" for theirs, ours in parts.items()}
    norms = [
        pair
        for theirs, ours in both.items()
        for pair in zip(list_batch_norm_names(f"{theirs}.1"), list_batch_norm_names(f"{ours}.bn"), strict=True)
    ]
    return (
        *(make_entry(f"{theirs}.0.weight", f"{ours}.conv.weight") for theirs, ours in both.items()),
        *(make_entry(theirs, ours) for theirs, ours in norms),
        *(make_entry(f"{block}f.se.fc{n}.*", f"{block}se.fc{n}.*") for n in (1, 2)),
        make_entry("fc.*", "head.fc.*"),
    )


NAME_TABLES = {
    "vit": NAME_TABLE,
    "resnet": tuple(map(make_entry, RESNET_NAMES, RESNET_NAMES)),
    "regnety": make_regnety_table("s#.b#."),
}


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    return "encoder.pos_embedding" in names or any(map(THEIR_BLOCK_PATTERN.match, names))


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, "module.")
    family = "regnety" if any(map(THEIR_BLOCK_PATTERN.match, tensors)) else find_convnet_family(tensors) or "vit"
    heads = layout.find_heads_by_width(tensors, "conv_proj.weight", HEADS_BY_WIDTH)
    model = layout.UntranslatedModel(
        layout="torchvision",
        family=family,
        tensors={
            THEIR_BLOCK_PATTERN.sub(lambda m: f"s{m[1]}.b{int(m[2]) + 1}.", name): each
            for name, each in tensors.items()
        },
        table=NAME_TABLES[family],
        known={**heads, **known},
        policy="torchvision",
        preprocessing=make_preprocessing,
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """As in its transforms: weights above 224 pixels are from SWAG, and vit_l_16 is cropped from 242 pixels."""
    size = config["image_size"]
    large = max(size) > 224
    crop = 224 / 242 if config.get("width") == 1024 and config.get("patch_size") == (16, 16) else 0.875
    return Preprocessing(
        image_size=size,
        crop=1.0 if large else crop,
        interpolation="bicubic" if large else "bilinear",
        **layout.IMAGENET_MEAN_STD,
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config = description.config
    if description.family == "resnet":
        layout.check_representable(
            "torchvision", {**config, "number of stages": len(config["stages"])}, RESNET_SUPPORTED_VALUES
        )
        layout.rename_and_write_tensors("torchvision", tensors, NAME_TABLES["resnet"], 1, path)
        return {}
    if description.family == "regnety":
        layout.check_representable("torchvision", config, {"channels": (3,)})
        renamed = {OUR_BLOCK_PATTERN.sub(rename_regnety_block, name): each for name, each in tensors.items()}
        layout.rename_and_write_tensors(
            "torchvision", renamed, make_regnety_table("trunk_output.block#.block#-#."), 1, path
        )
        return {}
    layout.check_representable("torchvision", config, SUPPORTED_VALUES)
    layout.rename_and_write_tensors(
        "torchvision", layout.add_zero_prefix_positions(tensors, config, 1), NAME_TABLE, config["heads"], path
    )
    return {"activation": "gelu", "norm_eps": 1e-6}


def rename_regnety_block(ours: re.Match[str]) -> str:
    return f"trunk_output.block{ours[1]}.block{ours[1]}-{int(ours[2]) - 1}."


LAYOUT = layout.Layout(
    name="torchvision",
    matches=matches,
    read=read,
    write=write,
    families=(*layout.TRANSFORMER_FAMILIES, "resnet", "regnety"),
)
