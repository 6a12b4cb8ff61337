"""What is worth keeping between two calls: exports of models, and which engine was the fastest, in the user's cache."""

import json
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

from vitrail import __version__
from vitrail.errors import CheckpointError, VitrailError, one_line
from vitrail.export.exported import CONFIG, MODEL, Exported
from vitrail.files import write_whole

MEASURED = "engines.json"


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
    viewer: Any, output: Any, *, merge: int, precision: Literal["fp32", "int8"], anew: bool = False
) -> Path:
    """An export of the model, written at the first time it is asked for; labels are not in it, for they may change."""
    from vitrail.export.writing import export_model

    place = export_folder(viewer, output, merge=merge, precision=precision)
    if anew:
        rmtree(place, ignore_errors=True)
    if not is_whole(place):
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


def kept_int8(place: Path, about: Exported) -> Path:
    """An exported model in 8 bits, made of its own file at the first time it is asked for; needs onnx and no torch."""
    from vitrail.data.photos import views
    from vitrail.export.exported import model_file
    from vitrail.export.quantise import in_8_bits

    file = model_file(place)
    kept = cache_folder() / "exports" / sha256(f"{__version__}int8{fingerprint(file)}".encode()).hexdigest()[:32]
    if not is_whole(kept):
        in_8_bits(file, kept, about, views(32, about.preprocessing))
    return kept


def is_whole(place: Path) -> bool:
    return (place / MODEL).is_file() and (place / CONFIG).is_file()


def fingerprint(file: Path) -> str:
    """Of a file, without reading all of it: where it lies, how long it is and when it was written."""
    found = file.stat()
    return f"{file.resolve()}:{found.st_size}:{found.st_mtime_ns}"


def recall(key: str) -> dict[str, Any] | None:
    """What was measured under that key; nothing where the file is missing or not ours."""
    found = all_measured().get(key)
    return found if isinstance(found, dict) else None


def remember(key: str, what: dict[str, Any]) -> None:
    """For the next time; where the cache cannot be written it is measured again then."""
    with suppress(CheckpointError, OSError):
        place = cache_folder() / MEASURED
        place.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**all_measured(), key: what}, indent=1)
        write_whole(place, lambda path: path.write_text(text, "utf-8"))


def all_measured() -> dict[str, Any]:
    try:
        found: Any = json.loads((cache_folder() / MEASURED).read_text("utf-8"))
    except (OSError, ValueError, RecursionError, VitrailError):
        return {}
    return found if isinstance(found, dict) else {}
