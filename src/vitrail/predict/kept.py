"""The user's cache: exports of models, and which engine was the fastest.

Entries are found by the contents of the model, never by its path, and carry a checksum; damaged ones are rebuilt.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from vitrail import __version__
from vitrail.errors import CheckpointError, VitrailError, one_line
from vitrail.export.exported import MODEL, Exported, description_in, model_file
from vitrail.files import read_text, write_text
from vitrail.parsing import CHECKSUM, parse_json, with_checksum, without_checksum
from vitrail.predict.identity import onnx_contents, short_key

MEASURED = "engines"  # the folder of measured speeds: one file per key, so that processes do not overwrite each other's
LARGEST = 2**16  # bytes of such a file


def cache_folder() -> Path:
    try:
        return Path.home() / ".cache" / "vitrail"
    except RuntimeError as error:
        raise CheckpointError(f"{one_line(error)} expected one, to keep exports in: set HOME") from None


def export_folder(viewer: Any, output: str, *, merge: int, precision: str) -> Path:
    """Where the export of such a model is, or will be: by its weights, its config and how it sees."""
    from vitrail.export.writing import digest

    about = [__version__, type(viewer.model).__name__, asdict(viewer.model.config), asdict(viewer.preprocessing)]
    text = json.dumps([*about, digest(viewer.model), output, merge, precision], default=str)
    return cache_folder() / "exports" / sha256(text.encode()).hexdigest()[:32]


def kept_export(
    viewer: Any, output: Any, *, merge: int, precision: Literal["fp32", "int8"], rebuild: bool = False
) -> Path:
    """An export of the model, written at the first time it is asked for; labels are not in it, for they may change."""
    from vitrail.export.folder import remove_export
    from vitrail.export.writing import export_model

    place = export_folder(viewer, output, merge=merge, precision=precision)
    if rebuild or not is_whole(place):
        remove_export(place)
        export_model(
            viewer.model,
            place,
            preprocessing=viewer.preprocessing,
            to="onnx" if precision == "fp32" else "onnx-int8",
            output=output,
            merge=merge,
            overwrite=True,
        )
    return place


def kept_int8(place: Path, about: Exported, *, rebuild: bool = False) -> Path:
    """An exported model in 8 bits, made of its own file at the first time it is asked for; needs onnx and no torch."""
    from vitrail.data.photos import views
    from vitrail.export.folder import remove_export
    from vitrail.export.quantise import in_8_bits

    file = model_file(place)
    contents = onnx_contents(file, about.files)
    kept = cache_folder() / "exports" / short_key(__version__, "int8", *contents, about.to_json())
    if rebuild or not is_whole(kept):
        remove_export(kept)
        in_8_bits(file, kept, about, views(32, about.preprocessing), contents[0])
    return kept


def is_whole(place: Path) -> bool:
    """Whether a complete export is there; its checksums are verified when it is opened."""
    with suppress(VitrailError, OSError):
        about = description_in(place)
        return about is not None and MODEL in about.files and (place / MODEL).is_file()
    return False


def recall(key: str) -> dict[str, Any] | None:
    """What was measured under that key; None if the file is missing, damaged or not ours."""
    try:
        found: Any = parse_json(read_text(measured_file(key), LARGEST))
        if not isinstance(found, dict) or CHECKSUM not in found:
            return None
        rest = without_checksum(found)
    except (OSError, ValueError, RecursionError, VitrailError):
        return None
    what = rest.get("measured")
    return what if rest.get("key") == key and isinstance(what, dict) else None


def remember(key: str, what: dict[str, Any]) -> None:
    """For the next time; where the cache cannot be written it is measured again then."""
    with suppress(CheckpointError, OSError):
        place = measured_file(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(with_checksum({"key": key, "measured": what}), indent=1))


def measured_file(key: str) -> Path:
    return cache_folder() / MEASURED / f"{short_key(key)}.json"
