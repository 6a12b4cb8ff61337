"""One owner for a folder that is written for hours: a lock file in it, held until the process ends.

POSIX record locks are used (fcntl). They end with the process, even after kill -9, so a leftover lock file means
nothing, and data workers that outlive their parent do not hold it. Where the system or the disk has no such
locks (some network disks), the process number in the file is compared with the processes of this machine instead.
"""

import os
import re
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitrail.errors import VitrailError, one_line
from vitrail.files import check_regular

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None

LOCK = ".lock"
OURS = re.compile(rb"\0*|[0-9]+( [^\n]*)?\n?")  # process and machine; a power cut leaves nothing, or zeros
LONGEST = 300  # bytes of a lock file
HELD = dict[tuple[int, Path], int]()  # (process, lock file) → thread: record locks do not exclude other threads
GUARD = threading.Lock()


class InUseError(VitrailError):
    """Another process, or another thread of this one, is writing there."""


@contextmanager
def locked(folder: Path, what_else: str = "wait for it to finish") -> Generator[None]:
    """Holds the folder's lock; InUseError at once if another process or thread does. Reentrant within a thread."""
    path = folder.resolve() / LOCK
    key, thread = (os.getpid(), path), threading.get_ident()
    with GUARD:
        holder = HELD.get(key)
        if holder is None:
            HELD[key] = thread
    if holder == thread:
        yield
        return
    if holder is not None:
        raise InUseError(f"{folder} is in use by another thread of this process; {what_else}")
    try:
        descriptor = acquire(path, folder, what_else)
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may be gone or read-only by now
                if is_same(descriptor, path) and key[0] == os.getpid():  # otherwise it belongs to another process
                    path.unlink()
            os.close(descriptor)
    finally:
        with GUARD:
            del HELD[key]


def acquire(path: Path, folder: Path, what_else: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        try:
            descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
            close_unless_regular(descriptor)
        except OSError as error:
            raise VitrailError(
                f"cannot lock {folder}: {path}: {one_line(error)}; remove it, or make it writable"
            ) from None
        if not lock(descriptor):
            owner = owner_of(descriptor)
            os.close(descriptor)
            raise InUseError(f"{folder} is in use by another process{owner}; {what_else}")
        if is_same(descriptor, path):  # otherwise its previous owner has just deleted it
            if not is_own(descriptor):
                os.close(descriptor)
                raise VitrailError(
                    f"cannot lock {folder}: {path} is not a lock file of vitrail; nothing is changed: move it away"
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)


def close_unless_regular(descriptor: int) -> None:
    try:
        check_regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise


def lock(descriptor: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # no locks on this disk
        pass
    return not is_alive(descriptor)


def is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def is_own(descriptor: int) -> bool:
    """Whether the file holds what `acquire` writes, and has no other name: it is about to be overwritten."""
    found = os.pread(descriptor, LONGEST + 1, 0)
    return os.fstat(descriptor).st_nlink == 1 and len(found) <= LONGEST and OURS.fullmatch(found) is not None


def owner_of(descriptor: int) -> str:
    process = os.pread(descriptor, 20, 0).split(b" ")[0]
    return f" (pid {int(process)})" if process.isdigit() else ""


def is_alive(descriptor: int) -> bool:
    """Whether the process whose number is in the file still runs on this machine."""
    process, _, host = os.pread(descriptor, LONGEST, 0).decode("utf-8", "replace").strip().partition(" ")
    if not process.isdigit() or host != socket.gethostname() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to another user
        return True
    return True
