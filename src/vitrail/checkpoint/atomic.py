"""Files that appear whole or not at all, whatever happens while they are written."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from vitrail.errors import CheckpointError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, makes it durable, and only then gives it its name."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            synchronise(temporary)
            temporary.chmod(0o666 & ~current_umask())
            temporary.replace(path)
            synchronise(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; the old file, if any, is whole"
        ) from error


def synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
