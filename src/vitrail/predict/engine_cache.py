"""The user's cache: exports of models, and measured speeds of engines.

Entries are keyed by the contents of the model, never by its path, and have checksums; damaged ones are rebuilt.
"""

import json
import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal, TypeVar

from vitrail import __version__
from vitrail.base.errors import CheckpointError, VitrailError
from vitrail.base.files import file_checksum, get_cache_folder, make_folder, read_text, write_text
from vitrail.base.json_yaml import CHECKSUM_KEY, add_checksum, parse_json, verify_and_remove_checksum
from vitrail.base.locks import LOCK_FILE_NAME, lock_folder, wait_for_entry_lock
from vitrail.export.description import ONNX_FILE, read_folder_description
from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import find_image_config
from vitrail.opening import Opened
from vitrail.predict.model_checksums import compute_onnx_checksums, hash_texts

EXPORTS_FOLDER = "exports"
SPEEDS_FOLDER = "engines"  # one file per key, so that processes do not overwrite each other's
MAX_SPEED_FILE_BYTES = 2**16
UNFINISHED_NAME = re.compile(r"\.([0-9a-f]+)\.[a-z0-9_]{8}")  # of the folders that write_folder_atomically makes

Entry = TypeVar("Entry")


def export_cache_path(loaded: Opened, output: str, *, merge: int, precision: str) -> Path:
    """Where the export of a model is cached: by its weights, config and preprocessing."""
    from vitrail.checkpoint.checksums import checksum_own_code
    from vitrail.export.export import compute_weights_digest

    model: Any = loaded.model
    about = [__version__, type(model).__name__, asdict(model.config), asdict(loaded.preprocessing)]
    about += [compute_weights_digest(model), output, merge, precision, *checksum_own_code(model)]
    text = json.dumps(about, default=str)
    return get_cache_folder() / EXPORTS_FOLDER / sha256(text.encode()).hexdigest()[:32]


def is_export_cached(loaded: Opened, output: str, merge: int) -> bool:
    """Whether the model was exported before."""
    if find_image_config(loaded.model) is None:
        return False
    return is_complete_export(export_cache_path(loaded, output, merge=merge, precision="fp32"))


def write_cached_export(
    loaded: Opened, path: Path, output: Any, *, merge: int, precision: Literal["fp32", "int8"]
) -> None:
    """Write the export of a model into the cache. It has no labels, since those may change."""
    from vitrail.export.export import export_model

    export_model(
        loaded.module,
        path,
        preprocessing=loaded.preprocessing,
        to="onnx" if precision == "fp32" else "onnx-int8",
        output=output,
        merge=merge,
        progress=False,  # of the job
    )


def open_cached_int8_export(exported: ExportedModel, open_export: Callable[[Path], Entry]) -> Entry:
    """Open an exported model quantized to int8, written on first use. Needs onnx, but not torch."""
    from vitrail.export.agreement import make_photo_crops
    from vitrail.export.quantize import write_int8_export

    about = exported.description
    checksums = compute_onnx_checksums(exported.file, about.files)
    path = get_cache_folder() / EXPORTS_FOLDER / hash_texts(__version__, "int8", *checksums, about.to_json())

    def write(path: Path) -> None:
        write_int8_export(exported.file, path, about, make_photo_crops(32, about.preprocessing))

    return open_or_write_export(path, write, open_export)


def open_or_write_export(path: Path, write: Callable[[Path], object], open_export: Callable[[Path], Entry]) -> Entry:
    """Open an export in the cache. If it is missing or damaged, one process writes it and the others wait for it.

    An intact export is never removed or replaced, so that no process loses the one that it uses.
    """
    from vitrail.export.atomic_folder import remove_export  # slow to import

    if is_complete_export(path):
        with suppress(CheckpointError, OSError):
            return open_export(path)
    make_folder(path.parent)
    remove_unfinished_exports(path.parent)
    with wait_for_entry_lock(path):
        if not is_complete_export(path, verify=True):  # otherwise another process has written it
            remove_export(path)
            write(path)
    return open_export(path)


def remove_unfinished_exports(folder: Path) -> None:
    """Delete what killed processes left: unfinished folders of entries whose lock nobody holds."""
    with suppress(OSError):
        for left in list(folder.iterdir()):
            found = UNFINISHED_NAME.fullmatch(left.name)
            if found and left.is_dir() and not left.is_symlink():
                with suppress(VitrailError), lock_folder(folder, name=f".{found[1]}{LOCK_FILE_NAME}"):
                    rmtree(left, ignore_errors=True)


def is_complete_export(path: Path, *, verify: bool = False) -> bool:
    """Whether a complete export is there, with `verify` also whether its files match their checksums."""
    with suppress(VitrailError, OSError):
        about = read_folder_description(path)
        return (
            about is not None
            and ONNX_FILE in about.files
            and all((path / name).is_file() for name in about.files)
            and not (verify and any(file_checksum(path / name) != value for name, value in about.files.items()))
        )
    return False


def read_engine_speeds(key: str) -> dict[str, Any] | None:
    """The speeds measured under a key; None if the file is missing, damaged or not ours."""
    try:
        found: Any = parse_json(read_text(speed_file_path(key), MAX_SPEED_FILE_BYTES))
        if not isinstance(found, dict) or CHECKSUM_KEY not in found:
            return None
        rest = verify_and_remove_checksum(found)
    except (OSError, ValueError, VitrailError):
        return None
    speeds = rest.get("measured")
    return speeds if rest.get("key") == key and isinstance(speeds, dict) else None


@contextmanager
def lock_engine_speeds(key: str) -> Generator[None]:
    """Let one process measure while others wait for its speeds; without the lock if the cache cannot be written."""
    with ExitStack() as stack:
        with suppress(VitrailError, OSError):
            path = speed_file_path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(wait_for_entry_lock(path))
        yield


def write_engine_speeds(key: str, speeds: dict[str, Any]) -> None:
    """Cache measured speeds; if the cache cannot be written, they are measured again next time."""
    with suppress(CheckpointError, OSError):
        path = speed_file_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(add_checksum({"key": key, "measured": speeds}), indent=1))


def speed_file_path(key: str) -> Path:
    return get_cache_folder() / SPEEDS_FOLDER / f"{hash_texts(key)}.json"
