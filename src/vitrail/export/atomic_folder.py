"""Write the folder of an export atomically. It replaces nothing but another export."""

import errno
import os
import signal
import stat
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import is_leftover_temporary_file
from vitrail.base.locks import LOCK_FILE_NAME, lock_folder
from vitrail.export.description import CONFIG_FILE, CTRANSLATE2_FILES, EXPORT_FILES, has_export_config


def check_target_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but an export; a checkpoint also has a config.json, which would be lost."""
    if not os.path.lexists(folder):
        if folder.suffix == ".onnx":
            raise CheckpointError(
                f"{folder}: an export is a folder with model.onnx in it; use a name such as {folder.stem}"
            )
        return
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link; expected a new folder: nothing is replaced through a link")
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{folder} already exists; choose a new folder, or set `overwrite`")
    if not folder.is_dir() or not has_export_config(folder):
        raise CheckpointError(f"{folder} is not an export, so it is not replaced; choose a new folder")
    check_only_export_files(folder)


def check_only_export_files(folder: Path) -> None:
    """Refuse a folder that contains anything but the files of an export, of one kind."""
    names = {path.name for path in folder.iterdir()}
    of_images = names & {*EXPORT_FILES} - {CONFIG_FILE, *CTRANSLATE2_FILES}
    files = [name for name in EXPORT_FILES if not (of_images and name in CTRANSLATE2_FILES)]
    for path in folder.iterdir():
        known = path.name in (*files, LOCK_FILE_NAME) or is_leftover_temporary_file(path, CONFIG_FILE)
        if not known or not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(
                f"{folder} holds {path.name!r}, which is not part of an export, so nothing in it is replaced; "
                "move that file away, or choose a new folder"
            )


def remove_export(folder: Path) -> None:
    """Delete a damaged export in the cache; anything else in its place is an error and stays."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder} is not a folder; expected an export or nothing: move it away")
    if folder.is_dir():
        check_only_export_files(folder)
        try:
            rmtree(folder)
        except OSError as error:
            raise CheckpointError(f"cannot delete {folder}: {describe_error(error)}; delete it") from error


@contextmanager
def exit_at_sigterm() -> Generator[None]:
    """Let SIGTERM raise SystemExit, so that unfinished files are removed; unless the program handles it itself."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def write_folder_atomically(folder: Path, *, overwrite: bool = True) -> Generator[Path]:
    """A temporary folder next to it, which is renamed at the end, or removed after an error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exit_at_sigterm():
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
    """Rename the folder; replace the files of an older export one by one, under a lock."""
    if not folder.is_symlink() and (not folder.is_dir() or not any(folder.iterdir())):
        with suppress(FileNotFoundError):
            folder.rmdir()
        try:
            place.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                raise
        else:
            return
    check_target_folder(folder, overwrite=overwrite)  # again: something may have appeared in the meantime
    with lock_folder(folder):
        for name in EXPORT_FILES:
            if (place / name).exists():
                (place / name).replace(folder / name)
            else:  # left from the older export
                (folder / name).unlink(missing_ok=True)
