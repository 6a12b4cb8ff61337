"""Read files of sentences, one per line, from untrusted UTF-8 text, plain or gzip, within limits."""

import gzip
import zlib
from io import BytesIO
from pathlib import Path

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_bytes, suggest_sibling

MAX_FILE_BYTES = 2**30  # compressed or not
MAX_LINE_BYTES = 2**16  # a sentence has about 100
MAX_LINES, FREE_LINES = 2**24, 2**20  # a line takes about 200 bytes of memory,
MIN_MEAN_LINE_BYTES = 16  # so beyond the first million a file has one line per 16 bytes at most
MAX_UNPACK_RATIO, UNPACK_ALLOWANCE = 64, 2**24  # a file unpacks to at most RATIO × its size + ALLOWANCE
GZIP_MAGIC = b"\x1f\x8b"


def read_sentences(path: Path) -> list[str]:
    """The lines of a file without the white space around them; a line without text is an empty string."""
    return [line.strip() for line in read_text_lines(path)]


def read_text_lines(path: Path) -> list[str]:
    """The lines of a file without their line ends."""
    return split_lines(read_unpacked(path), str(path))


def split_lines(data: bytes, where: str) -> list[str]:
    """The lines of a text in UTF-8 without their line ends."""
    if b"\0" in data:
        raise DataError(f"{where} has a NUL byte in line {find_line(data, data.index(0))}; expected text in UTF-8")
    most = min(MAX_LINES, FREE_LINES + len(data) // MIN_MEAN_LINE_BYTES)
    if (count := data.count(b"\n")) > most:
        raise DataError(f"{where} has {count:,} lines in {len(data):,} bytes; expected at most {most:,}")
    longest, number = max(((len(line), number) for number, line in enumerate(data.split(b"\n"), 1)))
    if longest > MAX_LINE_BYTES:
        raise DataError(
            f"line {number} of {where} has {longest:,} bytes; expected one sentence per line, at most "
            f"{MAX_LINE_BYTES:,}"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (line {find_line(data, error.start)}); convert it, for example with iconv"
        ) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def read_unpacked(path: Path) -> bytes:
    """The bytes of a regular file, unpacked if they are gzip, whatever its name."""
    try:
        packed = read_bytes(path, MAX_FILE_BYTES)
        if not packed.startswith(GZIP_MAGIC):
            return packed
        max_bytes = min(MAX_UNPACK_RATIO * len(packed) + UNPACK_ALLOWANCE, MAX_FILE_BYTES)
        data = gzip.GzipFile(fileobj=BytesIO(packed)).read(max_bytes + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {describe_error(error)}; expected a text file, plain or gzip"
            f"{suggest_sibling(path)}"
        ) from None
    if len(data) > max_bytes:
        raise DataError(f"{path} of {len(packed):,} bytes would unpack to more than {max_bytes:,}; expected sentences")
    return data


def find_line(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1
