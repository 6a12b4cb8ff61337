"""Files of the authors' own code, for architectures that no library has: a state dict, flat or under a wrapper."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, recognize_source
from vitrail.checkpoint.layouts import timm
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import SourceNames

NAME = "authors"
# `details` of a source: `kernel`, a tensor with as many rows as the model is wide, if heads follow from the width;
# `wrapper`, the key of the tensors in a file, by default state_dict; `preprocessing`, where it is not the default one;
# `ignored`, a pattern of tensors that are not used; `fields`, the config fields of all its models


def matches(contents: RawContents) -> bool:
    return recognize_source(NAME, layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    family, source = get_source(NAME, tensors, contents.path)
    heads = layout.find_heads_by_width(tensors, source.details.get("kernel", ""), source)
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**source.details.get("fields", {}), **heads, **known},
        policy="deit",
        ignore=source.details.get("ignored", ""),
        preprocessing=partial(make_preprocessing, source),
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def make_preprocessing(source: SourceNames, config: Mapping[str, Any]) -> Preprocessing:
    """ImageNet's mean and a crop of 0.875, unless the source declares others."""
    fields: dict[str, Any] = {"crop": 0.875, **layout.IMAGENET_MEAN_STD, **source.details.get("preprocessing", {})}
    return Preprocessing(image_size=config["image_size"], **fields)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable(NAME, config, source.supported)
    wrapper = source.details.get("wrapper", "state_dict")
    layout.rename_and_write_tensors(NAME, tensors, source.table, config.get("heads", 1), path, wrapper=wrapper)
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
