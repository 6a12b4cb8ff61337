"""torchvision's ViTs, also from before their MLP was renamed; its ResNets and RegNetYs.

A ResNet has the same names in timm: a file is read as timm's unless the user names torchvision.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, recognize_source
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import SourceNames

NAME = "torchvision"
# `details` of a source: `ignored`, a pattern of tensors that follow from the config; `buffers`, which makes them for a
# config; `crop`, which returns the share of the image that its transforms crop, and their `interpolation`, by default
# bicubic


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    return recognize_source(NAME, names) is not None and recognize_source("timm", names) is None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, "module.")
    family, source = get_source(NAME, tensors, contents.path)
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**layout.find_heads_by_width(tensors, "conv_proj.weight", source), **known},
        policy="torchvision",
        preprocessing=partial(make_preprocessing, source),
        ignore=source.details.get("ignored", ""),
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def make_preprocessing(source: SourceNames, config: Mapping[str, Any]) -> Preprocessing:
    """As in its transforms: weights above 224 pixels are from SWAG, and vit_l_16 is cropped from 242 pixels."""
    size = config["image_size"]
    if "crop" in source.details:
        return Preprocessing(
            image_size=size,
            crop=source.details["crop"](config),
            interpolation=source.details.get("interpolation", "bicubic"),
            **layout.IMAGENET_MEAN_STD,
        )
    large = max(size) > 224
    crop = 224 / 242 if config.get("width") == 1024 and config.get("patch_size") == (16, 16) else 0.875
    return Preprocessing(
        image_size=size,
        crop=1.0 if large else crop,
        interpolation="bicubic" if large else "bilinear",
        **layout.IMAGENET_MEAN_STD,
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable(NAME, config, source.supported)
    renamed = layout.add_zero_prefix_positions(tensors, config, 1)
    buffers = source.details["buffers"](config) if "buffers" in source.details else {}
    layout.rename_and_write_tensors(NAME, renamed, source.table, config.get("heads", 1), path, buffers=buffers)
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
