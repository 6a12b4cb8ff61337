"""The user's cache: exports of models, and measured speeds of engines.

Entries are keyed by the contents of the model, never by its path, and have checksums; damaged ones are rebuilt.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from vitrail import __version__
from vitrail.errors import CheckpointError, VitrailError
from vitrail.export.description import ONNX_FILE, read_folder_description
from vitrail.export.exported_model import ExportedModel
from vitrail.files import get_cache_folder, read_text, write_text
from vitrail.json_yaml import CHECKSUM_KEY, add_checksum, parse_json, verify_and_remove_checksum
from vitrail.loaded_model import LoadedModel
from vitrail.predict.model_checksums import compute_onnx_checksums, hash_texts

SPEEDS_FOLDER = "engines"  # one file per key, so that processes do not overwrite each other's
MAX_SPEED_FILE_BYTES = 2**16


def export_cache_path(loaded: LoadedModel, output: str, *, merge: int, precision: str) -> Path:
    """Where the export of a model is cached: by its weights, config and preprocessing."""
    from vitrail.export.export import compute_weights_digest

    model: Any = loaded.model
    about = [__version__, type(model).__name__, asdict(model.config), asdict(loaded.preprocessing)]
    text = json.dumps([*about, compute_weights_digest(model), output, merge, precision], default=str)
    return get_cache_folder() / "exports" / sha256(text.encode()).hexdigest()[:32]


def get_or_write_cached_export(
    loaded: LoadedModel, output: Any, *, merge: int, precision: Literal["fp32", "int8"], rebuild: bool = False
) -> Path:
    """An export of the model, written on first use. It has no labels, since those may change."""
    from vitrail.export.atomic_folder import remove_export
    from vitrail.export.export import export_model

    path = export_cache_path(loaded, output, merge=merge, precision=precision)
    if rebuild or not is_complete_export(path):
        remove_export(path)
        export_model(
            loaded.module,
            path,
            preprocessing=loaded.preprocessing,
            to="onnx" if precision == "fp32" else "onnx-int8",
            output=output,
            merge=merge,
            overwrite=True,
        )
    return path


def get_or_write_int8_export(exported: ExportedModel, *, rebuild: bool = False) -> Path:
    """An exported model quantised to int8, written on first use. Needs onnx, but not torch."""
    from vitrail.data.photos.views import make_photo_views
    from vitrail.export.atomic_folder import remove_export
    from vitrail.export.quantise import write_int8_export

    about = exported.description
    checksums = compute_onnx_checksums(exported.file, about.files)
    path = get_cache_folder() / "exports" / hash_texts(__version__, "int8", *checksums, about.to_json())
    if rebuild or not is_complete_export(path):
        remove_export(path)
        write_int8_export(exported.file, path, about, make_photo_views(32, about.preprocessing), checksums[0])
    return path


def is_complete_export(path: Path) -> bool:
    """Whether a complete export is there; its checksums are verified when it is opened."""
    with suppress(VitrailError, OSError):
        about = read_folder_description(path)
        return about is not None and ONNX_FILE in about.files and (path / ONNX_FILE).is_file()
    return False


def read_engine_speeds(key: str) -> dict[str, Any] | None:
    """The speeds measured under a key; None if the file is missing, damaged or not ours."""
    try:
        found: Any = parse_json(read_text(speed_file_path(key), MAX_SPEED_FILE_BYTES))
        if not isinstance(found, dict) or CHECKSUM_KEY not in found:
            return None
        rest = verify_and_remove_checksum(found)
    except (OSError, ValueError, RecursionError, VitrailError):
        return None
    speeds = rest.get("measured")
    return speeds if rest.get("key") == key and isinstance(speeds, dict) else None


def write_engine_speeds(key: str, speeds: dict[str, Any]) -> None:
    """Cache measured speeds; if the cache cannot be written, they are measured again next time."""
    with suppress(CheckpointError, OSError):
        path = speed_file_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(add_checksum({"key": key, "measured": speeds}), indent=1))


def speed_file_path(key: str) -> Path:
    return get_cache_folder() / SPEEDS_FOLDER / f"{hash_texts(key)}.json"
