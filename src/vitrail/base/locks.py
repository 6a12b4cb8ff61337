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
from vitrail.base.files import SAFE_OPEN_FLAGS, check_regular_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE_NAME = ".lock"
LOCK_FILE_PATTERN = re.compile(rb"\0*|[0-9]+( [^\n]*)?\n?")  # pid and host; after a power cut empty or zeros
MAX_LOCK_FILE_BYTES = 300
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
        if holder is None:
            HELD_LOCKS[key] = thread
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
            with suppress(OSError):  # the folder may have been removed or made read-only
                if is_same_file(descriptor, path) and key[0] == os.getpid():  # otherwise another process owns it
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
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS, 0o666)
            close_and_raise_unless_regular(descriptor)
        except OSError as error:
            raise VitrailError(
                f"cannot lock {folder}: {path}: {describe_error(error)}; remove it or make it writable"
            ) from None
        if not try_lock(descriptor):
            owner = describe_owner(descriptor)
            os.close(descriptor)
            raise InUseError(f"{folder} is in use by another process{owner}; {remedy}")
        if is_same_file(descriptor, path):  # otherwise its previous owner has just deleted it
            if not is_our_lock_file(descriptor):
                os.close(descriptor)
                raise VitrailError(
                    f"cannot lock {folder}: {path} is not a lock file of vitrail and is left unchanged; move it away"
                )
            with suppress(OSError):  # on a full disk, the error about a folder in use lacks the pid
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)


def close_and_raise_unless_regular(descriptor: int) -> None:
    try:
        check_regular_file(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise


def try_lock(descriptor: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # this disk has no locks
        pass
    return not is_owner_alive(descriptor)


def is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def is_our_lock_file(descriptor: int) -> bool:
    """Whether `acquire_lock_file` wrote this file and it has no other hard link, so that it may be overwritten."""
    content = os.pread(descriptor, MAX_LOCK_FILE_BYTES + 1, 0)
    return (
        os.fstat(descriptor).st_nlink == 1
        and len(content) <= MAX_LOCK_FILE_BYTES
        and LOCK_FILE_PATTERN.fullmatch(content) is not None
    )


def describe_owner(descriptor: int) -> str:
    pid = os.pread(descriptor, 20, 0).split(b" ")[0]
    return f" (pid {int(pid)})" if pid.isdigit() else ""


def is_owner_alive(descriptor: int) -> bool:
    """Whether the process whose pid is in the file still runs on this machine."""
    pid, _, host = os.pread(descriptor, MAX_LOCK_FILE_BYTES, 0).decode("utf-8", "replace").strip().partition(" ")
    if not pid.isdigit() or host != socket.gethostname() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process belongs to another user
        return True
    return True
