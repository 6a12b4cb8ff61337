"""Our own format: a folder of model.safetensors and config.json.

The weights carry a copy of the description in their header, and both copies the number of the save they come from.
Replacing one file is atomic, replacing two is not: if a save was cut off between them the numbers differ, and the
weights' own copy is used, since it is the one that fits them. Both files carry a checksum; folders of earlier versions
have none and still load.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import save_file
from torch import Tensor

from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.checksums import add_checksum_to_header, is_intact
from vitrail.checkpoint.files.raw_contents import CONFIG_FILE, WEIGHT_FILES, RawContents
from vitrail.checkpoint.layout import Layout, TranslatedCheckpoint
from vitrail.errors import CheckpointError
from vitrail.files import make_folder, write_atomically, write_text

DESCRIPTION_KEY = "vitrail"  # the key of the description in the weights' header


def matches(contents: RawContents) -> bool:
    return DESCRIPTION_KEY in contents.header or (
        contents.kind == "safetensors" and "format" in (contents.config or {})
    )


def read(contents: RawContents, known: Mapping[str, Any]) -> TranslatedCheckpoint:  # noqa: ARG001  # it says all there is to know
    if is_intact(contents.tensors, contents.header) is False:
        raise CheckpointError(
            f"{contents.path}: the weights do not match their checksum, so the file is damaged; "
            "restore it from a copy, or save the model again"
        )
    return TranslatedCheckpoint(description=read_saved_description(contents), tensors=contents.tensors)


def read_saved_description(contents: RawContents) -> Description:
    """config.json, as a person may have edited it; but family and config only as the weights were saved with them."""
    path = contents.path / CONFIG_FILE if contents.path.is_dir() else contents.path.parent / CONFIG_FILE
    header = contents.header.get(DESCRIPTION_KEY)
    inside = None if header is None else Description.from_json(header, f"the header of {contents.path}")
    if contents.config is None:
        if inside is None:
            raise CheckpointError(f"{path} is missing; expected what `vitrail.save` wrote")
        return inside
    beside = Description.from_dict(dict(contents.config), str(path))
    if inside is None:
        return beside
    if beside.save not in ("", inside.save):  # of another save: this one was cut off before it reached config.json
        return inside
    for name, value in {"family": beside.family, **beside.config}.items():
        saved = inside.family if name == "family" else inside.config.get(name)
        if value != saved:
            given = f"{name} {repr(value)[:40]}, but the weights were saved with {repr(saved)[:40]}"
            raise CheckpointError(f"{path} says {given}; expected the same (load can adapt: load(path, image_size=…))")
    labels, classes = beside.labels, inside.config.get("classes")
    if labels is not None and len(labels) != classes:
        raise CheckpointError(f"{path}: {len(labels)} labels for {classes} classes; expected one a class")
    return replace(beside, config=inside.config)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    description = replace(description, save=uuid4().hex)
    header = add_checksum_to_header(tensors, {DESCRIPTION_KEY: description.to_json()})
    make_folder(path)
    write_atomically(path / WEIGHT_FILES[0], lambda place: save_file(dict(tensors), place, header))
    write_text(path / CONFIG_FILE, description.to_json(signed=True))
    return {}


LAYOUT = Layout(name="vitrail", matches=matches, read=read, write=write)
