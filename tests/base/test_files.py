"""Files are read within limits, only regular ones, and deleted only outside linked folders."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.special_files import SPECIAL_FILES

from vitrail.base.errors import ConfigError
from vitrail.base.files import (
    file_checksum,
    is_leftover_temporary_file,
    read_bytes,
    read_lines,
    read_text,
    refuse_existing_outputs,
    remove_file,
)

READERS: dict[str, Callable[[Path], Any]] = {
    "bytes": read_bytes,
    "text": read_text,
    "lines": lambda path: list(read_lines(path)),
    "checksum": file_checksum,
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_only_regular_files_are_read_without_blocking(kind: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    SPECIAL_FILES[kind](tmp_path / "config.json")
    with pytest.raises(OSError, match=r".") as caught:
        read(tmp_path / "config.json")
    assert len(str(caught.value).splitlines()) == 1


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\r\n2")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_bytes(tmp_path / "b") == b"1\r\n2"
    assert read_text(tmp_path / "b") == "1\n2"


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="it has 100 bytes; expected at most 99"):
        read_bytes(path, 99)
    with pytest.raises(OSError, match="it has more than 10 bytes"):  # reports a size of 0
        read_bytes("/proc/cpuinfo", 10)


def test_system_files_without_an_end_are_not_read_forever() -> None:
    assert list(read_lines("/proc/self/pagemap")) == []
    assert file_checksum("/proc/self/pagemap") == hashlib.sha256().hexdigest()


def test_long_lines_are_truncated_and_the_next_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n" + b"b" * 35 + b"\nc\n" + b"d" * 10)
    assert list(read_lines(path, 10)) == ["a\n", "b" * 10, "c\n", "d" * 10]
    path.write_bytes(b"\xff\n\n")
    assert list(read_lines(path)) == ["\ufffd\n", "\n"]


def test_nothing_is_deleted_through_a_linked_folder(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    (real / "a").write_bytes(b"1")
    link.symlink_to(real)
    with pytest.raises(OSError, match="symbolic link; nothing is deleted"):
        remove_file(link / "a")
    (tmp_path / "b").symlink_to(real / "a")
    remove_file(tmp_path / "b")
    assert (real / "a").read_bytes() == b"1"
    remove_file(real / "a")
    remove_file(real / "a")  # already deleted
    assert not any(real.iterdir())


def test_temporary_files_are_recognized_by_their_complete_name(tmp_path: Path) -> None:
    names = {
        f".run.json.{'0a' * 16}": True,
        f".run.json.{'0a' * 15}": False,
        f".other.json.{'0a' * 16}": False,
        f"run.json.{'0a' * 16}": False,
        ".run.json": False,
    }
    for name, expected in names.items():
        (tmp_path / name).write_bytes(b"")
        assert is_leftover_temporary_file(tmp_path / name, r"run\.json") is expected, name
    link = tmp_path / f".run.json.{'1' * 32}"
    link.symlink_to(tmp_path / ".run.json")
    assert not is_leftover_temporary_file(link, r"run\.json")


def test_existing_outputs_are_refused_unless_overwritten(tmp_path: Path) -> None:
    new, old, link = tmp_path / "new.png", tmp_path / "old.png", tmp_path / "link"
    old.touch()
    link.symlink_to("nowhere")
    refuse_existing_outputs([new], overwrite=False)
    refuse_existing_outputs([new, old, link], overwrite=True)
    for existing in (old, link):
        with pytest.raises(ConfigError, match=rf"^{existing} already exists; use `overwrite`") as caught:
            refuse_existing_outputs([new, existing], overwrite=False)
        assert caught.value.fields == ("overwrite",)
