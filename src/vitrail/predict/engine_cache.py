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
from vitrail.errors import CheckpointError, VitrailError, describe_error
from vitrail.export.description import ONNX_FILE, ExportDescription, find_onnx_file, read_folder_description
from vitrail.files import read_text, write_text
from vitrail.json_yaml import CHECKSUM_KEY, add_checksum, parse_json, verify_and_remove_checksum
from vitrail.predict.model_checksums import compute_onnx_checksums, hash_texts

SPEEDS_FOLDER = (
    "engines"  # the folder of measured speeds: one file per key, so that processes do not overwrite each other's
)
MAX_SPEED_FILE_BYTES = 2**16  # bytes of such a file


def cache_folder() -> Path:
    try:
        return Path.home() / ".cache" / "vitrail"
    except RuntimeError as error:
        raise CheckpointError(f"{describe_error(error)} expected one, to keep exports in: set HOME") from None


def export_cache_path(viewer: Any, output: str, *, merge: int, precision: str) -> Path:
    """Where the export of such a model is, or will be: by its weights, its config and how it sees."""
    from vitrail.export.export import compute_weights_digest

    about = [__version__, type(viewer.model).__name__, asdict(viewer.model.config), asdict(viewer.preprocessing)]
    text = json.dumps([*about, compute_weights_digest(viewer.model), output, merge, precision], default=str)
    return cache_folder() / "exports" / sha256(text.encode()).hexdigest()[:32]


def get_cached_export(
    viewer: Any, output: Any, *, merge: int, precision: Literal["fp32", "int8"], rebuild: bool = False
) -> Path:
    """An export of the model, written at the first time it is asked for; labels are not in it, for they may change."""
    from vitrail.export.atomic_folder import remove_export
    from vitrail.export.export import export_model

    place = export_cache_path(viewer, output, merge=merge, precision=precision)
    if rebuild or not is_complete_export(place):
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


def get_cached_int8_export(place: Path, about: ExportDescription, *, rebuild: bool = False) -> Path:
    """An exported model in 8 bits, made of its own file at the first time it is asked for; needs onnx and no torch."""
    from vitrail.data.photos import make_photo_views
    from vitrail.export.atomic_folder import remove_export
    from vitrail.export.quantise import write_int8_export

    file = find_onnx_file(place)
    contents = compute_onnx_checksums(file, about.files)
    kept = cache_folder() / "exports" / hash_texts(__version__, "int8", *contents, about.to_json())
    if rebuild or not is_complete_export(kept):
        remove_export(kept)
        write_int8_export(file, kept, about, make_photo_views(32, about.preprocessing), contents[0])
    return kept


def is_complete_export(place: Path) -> bool:
    """Whether a complete export is there; its checksums are verified when it is opened."""
    with suppress(VitrailError, OSError):
        about = read_folder_description(place)
        return about is not None and ONNX_FILE in about.files and (place / ONNX_FILE).is_file()
    return False


def read_engine_speeds(key: str) -> dict[str, Any] | None:
    """What was measured under that key; None if the file is missing, damaged or not ours."""
    try:
        found: Any = parse_json(read_text(speed_file_path(key), MAX_SPEED_FILE_BYTES))
        if not isinstance(found, dict) or CHECKSUM_KEY not in found:
            return None
        rest = verify_and_remove_checksum(found)
    except (OSError, ValueError, RecursionError, VitrailError):
        return None
    what = rest.get("measured")
    return what if rest.get("key") == key and isinstance(what, dict) else None


def write_engine_speeds(key: str, speeds: dict[str, Any]) -> None:
    """For the next time; where the cache cannot be written it is measured again then."""
    with suppress(CheckpointError, OSError):
        place = speed_file_path(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(add_checksum({"key": key, "measured": speeds}), indent=1))


def speed_file_path(key: str) -> Path:
    return cache_folder() / SPEEDS_FOLDER / f"{hash_texts(key)}.json"
