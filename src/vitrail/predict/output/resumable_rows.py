"""The rows of an unfinished job: appended one by one, and kept up to the first damaged one when the job is resumed.

done.bin has 24 bytes per row: digests of the item's name, of its file's size and modification time, and of the row
itself. So a name is found however it is escaped in the row, a replaced file is noticed, a damaged row is computed
again, and millions of items fit into memory. As lines of CSV, TSV and JSON, rows are quoted and without formulas, and
names that are not valid UTF-8 can be restored.
"""

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError, missing_package_error
from vitrail.base.text import FORMULA_STARTS, format_csv_line
from vitrail.predict.output.partial_folder import COMPLETION_LOG_FILE, PartialFolder

MAX_RECORD_BYTES = 2**24  # bytes of one record: labels may be long, but not that long
LOG_RECORD_BYTES = 24  # bytes: name, file, row
Record = Mapping[str, Any]  # a row of a file, by column


@dataclass(frozen=True)
class Row:
    """The result of one item, or the reason why there is none."""

    name: str
    value: Any  # a record (predictions, translations, captions), or an array (features, maps); None if it has none
    error: DataError | None = None
    stamp: int = 0  # of its file, before it was read
    shown: str | None = None  # on a terminal


class AppendOnlyFile:
    """A file to which complete records are added, each written as soon as `add` returns."""

    def __init__(self, path: Path, size: int) -> None:
        """Truncate the file to `size`: what follows is an incomplete record."""
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.ftruncate(self.handle, size)
        os.lseek(self.handle, 0, os.SEEK_END)

    def add(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self.handle, left) :]

    def replace_start(self, data: bytes) -> None:
        os.pwrite(self.handle, data, 0)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def read_complete_lines(path: Path) -> Iterator[bytes]:
    """Each complete line, up to one that is truncated or too long to be ours."""
    if path.exists():
        with path.open("rb") as file:
            while (line := file.readline(MAX_RECORD_BYTES)).endswith(b"\n"):
                yield line


def read_json_records(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each record of a file of JSON lines and its bytes, up to the first damaged one."""
    for line in read_complete_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict) or not isinstance(row.get("file"), str):
            return
        yield row, line


def read_csv_records(path: Path, columns: int) -> Iterator[tuple[list[str], bytes]]:
    """Each record of a CSV file, the header included, and its bytes, up to the first damaged one."""
    import csv  # slow to import, and not needed for a single image

    record, quotes = bytearray(), 0
    for line in read_complete_lines(path):
        record += line  # a quoted name may contain line breaks
        quotes += line.count(b'"')
        if len(record) > MAX_RECORD_BYTES:
            return
        if quotes % 2 == 0:
            try:
                fields = next(csv.reader([record.decode("utf-8", "surrogateescape")]))
            except (csv.Error, StopIteration):
                return
            if len(fields) != columns:
                return
            yield fields, bytes(record)
            record, quotes = bytearray(), 0


class CompletedItems:
    """The images or sentences that are done, by name, with the stamps of their files at that time."""

    def __init__(self, digests: Iterable[int] | NDArray[np.uint64], stamps: Iterable[int] | NDArray[np.uint64]) -> None:
        names, files = (
            np.asarray(each if isinstance(each, np.ndarray) else array("Q", each)) for each in (digests, stamps)
        )
        order = np.argsort(names, kind="stable")
        self.digests, self.stamps = names[order], files[order]

    def __len__(self) -> int:
        return len(self.digests)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find_index(name) is not None

    def find_index(self, name: str) -> int | None:
        wanted = np.uint64(hash_to_integer(os.fsencode(name)))
        place = int(np.searchsorted(self.digests, wanted))
        return place if place < len(self.digests) and self.digests[place] == wanted else None

    def has_changed(self, name: str, stamp: int) -> bool:
        """Whether the item is done and its file was replaced or modified since."""
        place = self.find_index(name)
        return place is not None and int(self.stamps[place]) != stamp


class CompletionLog:
    """done.bin; one record is appended after each row."""

    def __init__(self, path: Path) -> None:
        """Reads the existing records; a truncated last record is ignored."""
        self.path, self.count, self.file = path, 0, None
        data = path.read_bytes() if path.exists() else b""
        kept = data[: len(data) // LOG_RECORD_BYTES * LOG_RECORD_BYTES]
        self.records = np.frombuffer(kept, "<u8").reshape(-1, 3)

    def accept_next_row(self, *row: bytes) -> bool:
        """Whether the next row matches its digest; if so it counts as done."""
        if self.count == len(self.records):
            return False
        name, stamp, seen = map(int, self.records[self.count])
        if seen != hash_to_integer(encode_name_and_stamp(name, stamp), *row):
            return False
        self.count += 1
        return True

    def open_for_appending(self) -> CompletedItems:
        """Keeps the accepted records and opens the file for more."""
        self.file = AppendOnlyFile(self.path, self.count * LOG_RECORD_BYTES)
        kept: Any = self.records[: self.count]
        self.records = np.zeros((0, 3), np.uint64)
        return CompletedItems(kept[:, 0], kept[:, 1])

    def add(self, name: str, stamp: int, *row: bytes) -> None:
        assert self.file is not None
        start = encode_name_and_stamp(hash_to_integer(os.fsencode(name)), stamp)
        self.file.add(start + hash_to_integer(start, *row).to_bytes(8, "little"))
        self.count += 1

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class ResumableRows:
    """A file of rows in the folder of an open job: CSV with these columns, or JSON lines if there are none."""

    def __init__(
        self,
        partial: PartialFolder,
        file_name: str,
        columns: Sequence[str] = (),
        read_values: Callable[[Record], bytes | None] = lambda _: b"",
    ) -> None:
        """`read_values` reads what belongs to a row and is stored elsewhere; None if it is missing."""
        self.partial, self.columns, self.failed = partial, columns, 0
        self.path = partial.folder / file_name
        with ExitStack() as stack:
            stack.callback(partial.close)
            with partial.convert_write_errors():
                self.log = CompletionLog(partial.folder / COMPLETION_LOG_FILE)
                stack.callback(self.log.close)
                end = self.accept_rows(read_values)
                self.done = self.log.open_for_appending()
                self.file = AppendOnlyFile(self.path, end)
                stack.callback(self.file.close)
                if not end:
                    self.file.add(self.header)
            self.opened = stack.pop_all()

    @property
    def header(self) -> bytes:
        return encode_utf8(format_csv_line(self.columns)) if self.columns else b""

    def accept_rows(self, read_values: Callable[[Record], bytes | None]) -> int:
        """Accept the rows written before, up to the first damaged one; return where they end in the file."""
        records, end = self.read_records(), 0
        if self.columns:
            _, first = next(records, ({}, b""))
            if first != self.header:
                return 0
            end = len(first)
        for record, line in records:
            values = read_values(record)
            if values is None or not self.log.accept_next_row(line, values):
                break
            end += len(line)
            self.failed += bool(record.get("error"))
        return end

    def read_records(self) -> Iterator[tuple[Record, bytes]]:
        """Each record and its bytes; of a CSV file the header, too."""
        if not self.columns:
            return read_json_records(self.path)
        records = read_csv_records(self.path, len(self.columns))
        return ((dict(zip(self.columns, fields, strict=True)), line) for fields, line in records)

    def write(self, row: Row, line: str, values: bytes = b"") -> None:
        with self.partial.convert_write_errors():
            self.file.add(encode_utf8(line))
            self.log.add(row.name, row.stamp, encode_utf8(line), values)

    def close(self) -> None:
        self.opened.close()


def encode_name_and_stamp(name: int, stamp: int) -> bytes:
    return name.to_bytes(8, "little") + stamp.to_bytes(8, "little")


def hash_to_integer(*parts: bytes) -> int:
    found = blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "little")


def compute_file_stamp(source: object) -> int:
    """A digest of a file's size and modification time; 0 for bytes, or if there is no such file."""
    if not isinstance(source, str | Path):
        return 0
    try:
        found = os.stat(source)  # noqa: PTH116
    except (OSError, ValueError):
        return 0
    return hash_to_integer(f"{found.st_size} {found.st_mtime_ns}".encode())


Format = TypeVar("Format", bound=str)


def choose_format(out: Path, given: Format | None, by_suffix: Mapping[str, Format]) -> Format:
    """The given format, by default that of the suffix of `out`."""
    found = given or by_suffix.get(out.suffix.lower())
    if found is None:
        raise ConfigError(
            f"`out` {out} has none of the suffixes {', '.join(by_suffix)}; use one of them, or set `format`"
        )
    return found


def format_json_line(row: Mapping[str, Any]) -> str:
    """JSON as UTF-8 text; as ASCII if a file name is not valid UTF-8, so that it can be restored."""
    line = json.dumps(row, ensure_ascii=False)
    return f"{line if is_utf8_encodable(line) else json.dumps(row)}\n"


def make_single_line(text: str) -> str:
    """A text without line breaks, of any kind: one line per row."""
    return " ".join(text.splitlines())


def escape_formula_in_path(name: str) -> str:
    """Write the name as ./=name, the same file, if a spreadsheet would take it for a formula; `-` is standard input."""
    return f"./{name}" if name.startswith(FORMULA_STARTS) and name != "-" else name


def round_probability(probability: float) -> float:
    """Six digits, the precision of a float32."""
    return float(f"{probability:.6g}")


def is_utf8_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_utf8(text: str) -> bytes:
    """Encode as UTF-8; a file name that is not valid UTF-8 keeps its bytes."""
    return text.encode("utf-8", "surrogateescape")


def escape_surrogates(name: str) -> str:
    """Escape the bytes of a name that is not valid UTF-8, as Python does: strings in parquet are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_package_error("a parquet file", "pyarrow", "embed") from None
    return pyarrow, pyarrow.parquet
