"""The folder of an export: it appears whole or not at all, and takes the place of nothing but another export."""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from time import sleep

from vitrail.errors import CheckpointError, VitrailError, describe_error
from vitrail.export.description import CONFIG_FILE, EXPORT_FILES, has_export_config
from vitrail.files import is_temporary_file
from vitrail.locks import LOCK_FILE_NAME, InUseError, lock_folder

LOCK_ATTEMPTS, LOCK_PAUSE_SECONDS = 50, 0.1  # of waiting for another process, in seconds


def check_target_folder(folder: Path, *, overwrite: bool) -> None:
    """Before the work; config.json is the name of a checkpoint's description too, which would be lost."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link; expected a new folder: nothing is replaced through a link")
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{folder} is there already; expected a new folder, or --overwrite")
    if not folder.is_dir() or not has_export_config(folder):
        raise CheckpointError(f"{folder} is no export, so it is not replaced; expected a new folder, or an export")
    check_only_export_files(folder)


def check_only_export_files(folder: Path) -> None:
    """Refuses a folder that holds anything but the files of an export."""
    for path in folder.iterdir():
        known = path.name in (*EXPORT_FILES, LOCK_FILE_NAME) or is_temporary_file(path, CONFIG_FILE)
        if not known or not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(
                f"{folder} holds {path.name!r}, which is not part of an export, so nothing in it is replaced; "
                "move that file away, or choose a new folder"
            )


def remove_export(folder: Path) -> None:
    """Deletes an export in the cache, damaged or not; anything else in its place is an error and is kept."""
    for left in reversed(range(LOCK_ATTEMPTS)):
        try:
            remove_export_files(folder)
        except (InUseError, FileNotFoundError):  # another process does the same, which takes a moment
            if not left:
                raise
            sleep(LOCK_PAUSE_SECONDS)
        except CheckpointError:
            raise
        except VitrailError:  # it cannot be locked: maybe since it is gone
            if os.path.lexists(folder):
                raise
        else:
            return


def remove_export_files(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder} is not a folder; expected an export or nothing: move it away")
    if folder.is_dir():
        check_only_export_files(folder)
        with lock_folder(folder):
            for path in folder.iterdir():
                if path.name != LOCK_FILE_NAME:
                    path.unlink(missing_ok=True)
        with suppress(OSError):  # another process may have written its own meanwhile
            folder.rmdir()


@contextmanager
def write_folder_atomically(folder: Path, *, overwrite: bool = True) -> Generator[Path]:
    """A place beside it to be filled, which gets its name in the end; what was begun and failed is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield place
            place.chmod(0o755)
            move_into_place(place, folder, overwrite=overwrite)
        finally:
            rmtree(place, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {describe_error(error)}") from error


def move_into_place(place: Path, folder: Path, *, overwrite: bool = True) -> None:
    """In one step where nothing was; over an older export part by part, by one process at a time."""
    if not folder.is_symlink() and (not folder.is_dir() or not any(folder.iterdir())):
        with suppress(FileNotFoundError):
            folder.rmdir()
        try:
            place.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was quicker with its own
                raise
        else:
            return
    check_target_folder(folder, overwrite=overwrite)  # again: something may have appeared meanwhile
    with lock_folder(folder):
        for name in EXPORT_FILES:
            if (place / name).exists():
                (place / name).replace(folder / name)
            else:  # of the older one, which the new description is not about
                (folder / name).unlink(missing_ok=True)
