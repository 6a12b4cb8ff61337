"""Files of sentences: plain and gzip, and hostile ones within limits."""

import gzip
from pathlib import Path
from time import process_time

import pytest
from support.special_files import SPECIAL_FILES

from vitrail.base.errors import DataError
from vitrail.data.text import text_files
from vitrail.data.text.text_files import read_sentences, read_text_lines


@pytest.mark.parametrize("name", ["a.de", "a.de.gz"])
@pytest.mark.parametrize("packed", [False, True])
def test_gzip_is_recognized_by_content_whatever_the_name(tmp_path: Path, name: str, packed: bool) -> None:
    text = "Ein Hund.\nÜber Größe\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
    assert read_sentences(tmp_path / name) == ["Ein Hund.", "Über Größe"]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffone\u2028still one\r\n \r\n\ttwo \x0b\nthree".encode())
    assert read_sentences(tmp_path / "a") == ["one\u2028still one", "", "two", "three"]
    assert read_text_lines(tmp_path / "a") == ["one\u2028still one", " ", "\ttwo \x0b", "three"]
    (tmp_path / "a").write_bytes(b"")
    assert read_sentences(tmp_path / "a") == []
    (tmp_path / "a").write_bytes(b"\n\n")
    assert read_sentences(tmp_path / "a") == ["", ""]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"good\nbad \xff\xfe\n", r"a is not UTF-8 \(line 2\)"),
        (b"good\n\nnu\0l\n", r"a has a NUL byte in line 3"),
        ("ein".encode("utf-16"), "a has a NUL byte in line 1"),
        (b"good\n" + b"x" * 10_000_000, r"line 2 of .*a has 10,000,000 bytes; expected one sentence per line"),
        (b"x" * 70_000 + b"\n", "line 1 of"),
        (gzip.compress(b"Ein Hund.\n" * 100)[:-20], "a cannot be read: Compressed file ended"),
        (gzip.compress(b"Ein Hund.\n")[:12] + b"\xff" * 20, "a cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_damaged_files_give_one_line(tmp_path: Path, data: bytes, match: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match=match) as caught:
        read_sentences(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """120 MB in a file of half a megabyte."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a b c\n" * 20_000_000, 1))
    started = process_time()
    with pytest.raises(DataError, match=r"a\.gz of [\d,]+ bytes would unpack to more than [\d,]+; expected sentences"):
        read_sentences(tmp_path / "a.gz")
    assert process_time() - started < 5


def test_too_many_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINES", 3)
    (tmp_path / "a").write_bytes(b"\n" * 4)
    with pytest.raises(DataError, match="a has 4 lines in 4 bytes; expected at most 3"):
        read_sentences(tmp_path / "a")


def test_short_lines_are_bounded_by_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "FREE_LINES", 3)
    (tmp_path / "a").write_bytes(b"a\n" * 4)
    with pytest.raises(DataError, match="a has 4 lines in 8 bytes; expected at most 3"):
        read_sentences(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"sixteen letters\n" * 4)
    assert len(read_sentences(tmp_path / "a")) == 4


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    SPECIAL_FILES[kind](tmp_path / "a")
    with pytest.raises(DataError, match="a cannot be read"):
        read_sentences(tmp_path / "a")
