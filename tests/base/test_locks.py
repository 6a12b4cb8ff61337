"""A folder has one owner; the lock of a dead process is void."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vitrail.base import locks
from vitrail.base.errors import VitrailError
from vitrail.base.locks import LOCK_FILE_NAME, InUseError, lock_folder

HOLD = """
import os, sys, time
from pathlib import Path
from vitrail.base.locks import lock_folder
with lock_folder(Path(sys.argv[1])):
    if "fork" in sys.argv and os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path, *more: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    return process


def end_group(process: "subprocess.Popen[str]") -> None:
    """End the process and its forks."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("with_system_locks", [True, False])
def test_a_folder_in_use_is_refused_until_its_owner_is_killed(
    with_system_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_system_locks:
        monkeypatch.setattr(locks, "fcntl", None)
    process = start_holder(tmp_path)
    try:
        reason = rf"in use by another process \(pid {process.pid}\); do something"
        with pytest.raises(InUseError, match=reason), lock_folder(tmp_path, "do something"):
            pass
        assert (tmp_path / LOCK_FILE_NAME).exists()
    finally:
        end_group(process)
    assert (tmp_path / LOCK_FILE_NAME).exists()  # left over, without effect
    with lock_folder(tmp_path):
        pass
    assert not (tmp_path / LOCK_FILE_NAME).exists()


def test_a_worker_that_outlives_its_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    process = start_holder(tmp_path, "fork")
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_folder(tmp_path):
            pass
    finally:
        end_group(process)


def test_the_lock_excludes_threads_and_is_reentrant(tmp_path: Path) -> None:
    refused = list[str]()

    def try_lock() -> None:
        try:
            with lock_folder(tmp_path):
                pass
        except InUseError as error:
            refused.append(str(error))

    with lock_folder(tmp_path):
        with lock_folder(tmp_path / "." if tmp_path.is_absolute() else tmp_path):
            pass
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "another thread of this process" in refused[0]
    try_lock()
    assert len(refused) == 1


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path):
        _ = 1 / 0
    with lock_folder(tmp_path):
        pass


@pytest.mark.timeout(10)
def test_a_lock_file_that_is_a_link_pipe_or_folder_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / LOCK_FILE_NAME).symlink_to(victim)
    with pytest.raises(VitrailError, match="cannot lock"), lock_folder(tmp_path):
        pass
    assert victim.read_bytes() == b"precious"
    (tmp_path / LOCK_FILE_NAME).unlink()
    (tmp_path / LOCK_FILE_NAME).mkdir()
    with pytest.raises(VitrailError, match="cannot lock"), lock_folder(tmp_path):
        pass
    (tmp_path / LOCK_FILE_NAME).rmdir()
    os.mkfifo(tmp_path / LOCK_FILE_NAME)
    with pytest.raises(VitrailError, match="cannot lock"), lock_folder(tmp_path):
        pass


def test_invalid_owners_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    for content in (
        b"",
        b"\0\0",
        b"0",
        b"99999999999999999999 x",
        b"1 \xff\xfe",
        f"{2**22 + 1} {os.uname().nodename}".encode(),
    ):
        (tmp_path / LOCK_FILE_NAME).write_bytes(content)
        with lock_folder(tmp_path):
            pass


def test_lock_files_of_other_programs_stay_unchanged(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE_NAME).write_text("notes of another program\n")
    with (
        pytest.raises(VitrailError, match="is not a lock file of vitrail and is left unchanged"),
        lock_folder(tmp_path),
    ):
        pass
    assert (tmp_path / LOCK_FILE_NAME).read_text() == "notes of another program\n"
