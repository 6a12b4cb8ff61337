"""Read files within limits and write them atomically. All small files of the package are read and written here."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vitrail.base.errors import CheckpointError, ConfigError, OutputError, describe_error, find_nearest_name

WEIGHTS_FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")  # a folder must not be named like a file
WRITE_ERRORS = (OSError, RuntimeError, ValueError, MemoryError)  # raised by the system and by libraries that write
MAX_TEXT_BYTES = 2**24  # for config.json, run.json, labels, recipes and index files
MAX_LINE_BYTES = 2**20  # for one line of a log
CHUNK_BYTES = 2**20  # read at once
MAX_SUGGESTED_FROM = 2000  # names in a folder that are compared with a missing one
IS_POSIX = os.name == "posix"  # Windows lacks the flags below
# Of files that are written: opening a named pipe does not wait for its other end, and opening a symbolic link fails.
SAFE_OPEN_FLAGS = os.O_NONBLOCK | os.O_NOFOLLOW if IS_POSIX else 0
FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def get_cache_folder() -> Path:
    """The folder for exports, measured speeds and weights: VITRAIL_HOME, else vitrail in XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("VITRAIL_HOME"):
        return Path(home)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrail"
    except RuntimeError as error:
        raise CheckpointError(f"no folder for the cache ({describe_error(error)}); set HOME or VITRAIL_HOME") from None


def open_regular_file_descriptor(path: str | Path) -> int:
    """Open a regular file and return its descriptor; anything else is an OSError. Links are followed."""
    check_regular_file(os.stat(path))  # noqa: PTH116  # before: opening a pipe blocks, and some devices have side effects
    return os.open(path, os.O_RDONLY)


def check_regular_file(status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError("it is a folder; expected a file")
    if kind != stat.S_IFREG:
        raise OSError(f"it is {FILE_KINDS.get(kind, 'not a regular file')}; expected a regular file")


def suggest_sibling(path: str | Path) -> str:
    """The end of an error about a missing file: ": did you mean 'cat.jpg'?" if there is a similar name next to it."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            names = sorted(each.name for each in islice(entries, MAX_SUGGESTED_FROM))
    except (OSError, ValueError):
        return ""
    nearest = None if os.path.lexists(path) else find_nearest_name(name, names)
    return "" if nearest is None else f": did you mean {os.path.join(folder, nearest)!r}?"  # noqa: PTH118


def read_bytes(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes`; otherwise raise an OSError that gives the reason."""
    status = os.stat(path)  # noqa: PTH116
    check_regular_file(status)
    if status.st_size > max_bytes:
        raise OSError(f"it has {status.st_size:,} bytes; expected at most {max_bytes:,}")
    with open(path, "rb") as file:  # noqa: PTH123
        data = file.read(status.st_size + 1)
        if len(data) > status.st_size:  # files in /proc report no size
            data += file.read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise OSError(f"it has more than {max_bytes:,} bytes; expected at most {max_bytes:,}")
    return data


def read_text(path: str | Path, max_bytes: int = MAX_TEXT_BYTES, *, errors: str = "strict") -> str:
    """Like `read_bytes`, decoded from UTF-8; invalid UTF-8 is a ValueError."""
    return read_bytes(path, max_bytes).decode("utf-8", errors).replace("\r\n", "\n")


def read_lines(path: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yield the lines of a regular file of any size, with their line ends; lines are cut at `max_line_bytes`."""
    with open(open_regular_file_descriptor(path), "rb") as file:  # also closes the descriptor
        left = os.fstat(file.fileno()).st_size  # some files in /proc never end
        while left > 0 and (line := file.readline(min(max_line_bytes, left))):
            yield line.decode("utf-8", "replace")
            left -= len(line)
            while left > 0 and line and not line.endswith(b"\n"):
                line = file.readline(min(max_line_bytes, left))
                left -= len(line)


def file_checksum(path: str | Path) -> str:
    """SHA-256 of a file, read in chunks: about 1 GB per second."""
    with open(open_regular_file_descriptor(path), "rb", buffering=0) as file:
        left, checksum = os.fstat(file.fileno()).st_size, hashlib.sha256()
        while left > 0 and (part := file.read(min(CHUNK_BYTES, left))):  # some files in /proc never end
            left -= len(part)
            checksum.update(part)
        return checksum.hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `path`, sync it to disk, then rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        try:
            write(temporary)
            temporary.chmod(mode)  # a writer that replaces the file may have made it private
            sync_to_disk(temporary)
            temporary.replace(path)
            sync_to_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except Exception as error:
        # A SafetensorError is a plain Exception, and safetensors may not be installed.
        if not isinstance(error, WRITE_ERRORS) and type(error).__name__ != "SafetensorError":
            raise
        raise OutputError(f"cannot write {path}: {describe_error(error)}; the previous file is unchanged") from error


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, "utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Write readable JSON; the folder is made."""
    make_folder(path.parent)
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def is_temporary_name(name: str, pattern: str) -> bool:
    """Whether `write_atomically` gives this name to a temporary file while it writes a file that matches `pattern`."""
    return re.fullmatch(rf"\.{pattern}\.[0-9a-f]{{32}}", name) is not None


def is_leftover_temporary_file(path: Path, pattern: str) -> bool:
    """Whether an interrupted `write_atomically` left this file; a link is never one."""
    return is_temporary_name(path.name, pattern) and path.is_file() and not path.is_symlink()


def remove_file(path: Path) -> None:
    """Delete a file if it exists. Links are deleted, not their targets; nothing is deleted in a linked folder."""
    if path.parent.is_symlink():
        raise OSError(f"{path.parent} is a symbolic link; nothing is deleted in the folder that it points to")
    path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    if folder.suffix in WEIGHTS_FILE_SUFFIXES:
        raise OutputError(f"{folder} has the name of a file; expected a folder name without {folder.suffix}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot make the folder {folder}: {describe_error(error)}") from error


def make_writable_folder(folder: Path) -> None:
    """Make a folder, and check that files can be created in it before any work is done."""
    from tempfile import TemporaryFile  # slow to import, and opening an export does not need it

    make_folder(folder)
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"cannot write in {folder}: {describe_error(error)}; choose another folder") from error


def refuse_existing_outputs(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to replace an existing file or folder unless `overwrite` is set. Commands call it before any work."""
    existing = None if overwrite else next((path for path in paths if os.path.lexists(path)), None)
    if existing is not None:
        raise ConfigError(f"{existing} already exists; use `overwrite` to replace it, or choose another name")


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
