"""vitrail's own format: a folder with model.safetensors and config.json.

The header of the weights has a copy of the description, and both copies have the id of the save they come from.
Replacing one file is atomic, replacing two is not: if a save was interrupted between them, the ids differ, and the copy
in the weights is used because it fits them. Both files have a checksum; folders of earlier versions have none and
still load.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import save_file
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.files import make_folder, write_atomically, write_text
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import Layout, TranslatedCheckpoint
from vitrail.checkpoint.weight_files import RawContents, add_checksum_to_header, matches_header_checksum
from vitrail.checkpoint.weight_folders import CONFIG_FILE, WEIGHT_FILES

DESCRIPTION_KEY = "vitrail"  # in the header of the weights


def matches(contents: RawContents) -> bool:
    return DESCRIPTION_KEY in contents.header or (
        contents.kind == "safetensors" and "format" in (contents.config or {})
    )


def read(contents: RawContents, known: Mapping[str, Any]) -> TranslatedCheckpoint:  # noqa: ARG001  # the file specifies all fields
    if matches_header_checksum(contents.tensors, contents.header) is False:
        raise CheckpointError(
            f"{contents.path}: the weights do not match their checksum, so the file is damaged; "
            "restore it from a copy or save the model again"
        )
    return TranslatedCheckpoint(description=read_saved_description(contents), tensors=contents.tensors)


def read_saved_description(contents: RawContents) -> Description:
    """Description in config.json, which may be edited, except for family and config, which must fit the weights."""
    path = contents.path / CONFIG_FILE if contents.path.is_dir() else contents.path.parent / CONFIG_FILE
    header = contents.header.get(DESCRIPTION_KEY)
    in_header = None if header is None else Description.from_json(header, f"the header of {contents.path}")
    if contents.config is None:
        if in_header is None:
            raise CheckpointError(f"{path} is missing; expected a folder written by vitrail.save")
        return in_header
    in_file = Description.from_dict(dict(contents.config), str(path))
    if in_header is None:
        return in_file
    if in_file.save not in ("", in_header.save):  # a save was interrupted before it wrote config.json
        return in_header
    for name, value in {"family": in_file.family, **in_file.config}.items():
        saved = in_header.family if name == "family" else in_header.config.get(name)
        if value != saved:
            raise CheckpointError(
                f"{path} has {name}={repr(value)[:40]}, but the weights were saved with {repr(saved)[:40]}; "
                "expected the same (to adapt the weights, load them with load(path, image_size=…))"
            )
    labels, classes = in_file.labels, in_header.config.get("classes")
    if labels is not None and len(labels) != classes:
        raise CheckpointError(f"{path}: {len(labels)} labels for {classes} classes; expected one label per class")
    return replace(in_file, config=in_header.config)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    description = replace(description, save=uuid4().hex)
    header = add_checksum_to_header(tensors, {DESCRIPTION_KEY: description.to_json()})
    make_folder(path)
    write_atomically(path / WEIGHT_FILES[0], lambda temporary: save_file(dict(tensors), temporary, header))
    write_text(path / CONFIG_FILE, description.to_json(signed=True))
    return {}


LAYOUTS = (Layout(name="vitrail", matches=matches, read=read, write=write),)
