"""Lock a folder that one process writes for hours, with a lock file that is held until the process ends.

POSIX record locks (fcntl) end with the process, even after kill -9. So a leftover lock file means nothing, and data
workers that outlive their parent do not hold the lock. Where the system or the disk has no such locks (some network
disks), the pid in the file is compared with the processes of this machine instead.
"""

import os
import re
import socket
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import sleep

from vitrail.base.errors import VitrailError, describe_error
from vitrail.base.files import SAFE_OPEN_FLAGS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE_NAME = ".lock"
MAX_LOCK_FILE_BYTES = 300
LOCK_FILE_PATTERN = re.compile(rb"\0{0,300}|([0-9]{1,20})(?: ([^\n]{0,255}))?\n?")  # pid, host; zeros after a power cut
WAIT_SECONDS = 0.1  # between two attempts
HELD_LOCKS = dict[tuple[int, Path], int]()  # (pid, lock file) → thread: record locks do not exclude threads
HELD_LOCKS_GUARD = threading.Lock()


class InUseError(VitrailError):
    """The folder is in use by another process, or by another thread of this one."""


@contextmanager
def lock_folder(folder: Path, remedy: str = "wait for it to finish", name: str = LOCK_FILE_NAME) -> Generator[None]:
    """Hold the lock of a folder. Raise InUseError if another process or thread holds it. Reentrant within a thread."""
    path = folder.resolve() / name
    key, thread = (os.getpid(), path), threading.get_ident()
    with HELD_LOCKS_GUARD:
        holder = HELD_LOCKS.get(key)
        HELD_LOCKS.setdefault(key, thread)
    if holder == thread:
        yield
        return
    if holder is not None:
        raise InUseError(f"{folder} is in use by another thread of this process; {remedy}")
    try:
        descriptor = acquire_lock_file(path, folder, remedy)
        try:
            yield
        finally:
            if key[0] == os.getpid():  # not in a fork
                with suppress(OSError):  # the folder may have been removed or made read-only
                    path.unlink()
            os.close(descriptor)
    finally:
        with HELD_LOCKS_GUARD:
            del HELD_LOCKS[key]


@contextmanager
def wait_for_entry_lock(path: Path) -> Generator[None]:
    """Hold the lock of an entry of a cache, a file or folder that may not exist yet, once no other process holds it."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_folder(path.parent, name=f".{path.name}{LOCK_FILE_NAME}"))
                break
            except InUseError:
                sleep(WAIT_SECONDS)
        yield


def acquire_lock_file(path: Path, folder: Path, remedy: str) -> int:
    """Open, lock and fill the lock file, and return its descriptor."""
    while True:
        with ExitStack() as stack:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS, 0o666)
                stack.callback(os.close, descriptor)
                content = os.pread(descriptor, MAX_LOCK_FILE_BYTES + 1, 0)  # fails for a pipe
            except OSError as error:
                raise VitrailError(
                    f"cannot lock {folder}: {path}: {describe_error(error)}; remove it or make it writable"
                ) from None
            found = LOCK_FILE_PATTERN.fullmatch(content)
            if found is None:
                raise VitrailError(
                    f"cannot lock {folder}: {path} is not a lock file of vitrail and is left unchanged; move it away"
                )
            if not try_lock(descriptor, found):
                owner = f" (pid {int(found[1])})" if found[1] else ""
                raise InUseError(f"{folder} is in use by another process{owner}; {remedy}")
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):  # otherwise its owner has just deleted it
                    stack.pop_all()
                    with suppress(OSError):  # on a full disk, the error about a folder in use lacks the pid
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                    return descriptor


def try_lock(descriptor: int, found: re.Match[bytes]) -> bool:
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # this disk has no locks
        pass
    return not is_owner_alive(found)


def is_owner_alive(found: re.Match[bytes]) -> bool:
    """Whether the process whose pid is in the file still runs on this machine."""
    if not found[1] or found[2] != socket.gethostname().encode() or int(found[1]) == os.getpid():
        return False
    try:
        os.kill(int(found[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process belongs to another user
        return True
    return True
