"""The folder of an export: it appears whole or not at all, and takes the place of nothing but another export."""

import errno
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from vitrail.errors import CheckpointError, one_line
from vitrail.export.exported import PARTS, is_exported


def check_place(folder: Path, *, overwrite: bool) -> None:
    """Before the work; config.json is the name of a checkpoint's description too, which would be lost."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{folder} is there already; expected a new folder, or --overwrite")
    if not folder.is_dir() or not is_exported(folder):
        raise CheckpointError(f"{folder} is no export, so it is not replaced; expected a new folder, or an export")


@contextmanager
def written_whole(folder: Path) -> Generator[Path]:
    """A place beside it to be filled, which gets its name in the end; what was begun and failed is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield place
            place.chmod(0o755)
            put(place, folder)
        finally:
            rmtree(place, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {one_line(error)}") from error


def put(place: Path, folder: Path) -> None:
    """In one step where nothing was; over an older export part by part."""
    if not folder.is_dir() or not any(folder.iterdir()):
        with suppress(FileNotFoundError):
            folder.rmdir()
        try:
            place.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was quicker with its own
                raise
        else:
            return
    for name in PARTS:
        if (place / name).exists():
            (place / name).replace(folder / name)
        else:  # of the older one, which the new description is not about
            (folder / name).unlink(missing_ok=True)
