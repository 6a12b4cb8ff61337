"""Files that appear whole or not at all, whatever happens while they are written."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

from vitrail.errors import CheckpointError, one_line

FILES = (".safetensors", ".pth", ".pt", ".bin", ".npz")  # endings that a folder of weights is surely not meant to have
FAILURES = (OSError, RuntimeError, ValueError, MemoryError)  # of a disk, and of those who write to it


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, makes it durable, and only then gives it its name."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        try:
            write(temporary)
            temporary.chmod(mode)  # a writer that replaces the file may have made it private
            synchronise(temporary)
            temporary.replace(path)
            synchronise(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except Exception as error:
        if not (isinstance(error, FAILURES) or type(error).__name__ == "SafetensorError"):  # a library of its own
            raise
        raise CheckpointError(f"cannot write {path}: {one_line(error)}; what stood there before is whole") from error


def make_folder(folder: Path) -> None:
    if folder.suffix in FILES:
        raise CheckpointError(f"{folder} has the name of a file; expected a folder, without {folder.suffix}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot make the folder {folder}: {one_line(error)}") from error


def make_writable(folder: Path) -> None:
    """As `make_folder`, and tried: what could not be written in the end is told before the work."""
    make_folder(folder)
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(f"cannot write in {folder}: {one_line(error)}; expected a place for results") from error


def synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
