"""Files in OUT.partial: opened only if they are ours, appended record by record, and read up to the first damage."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.base.files import SAFE_OPEN_FLAGS, open_regular_file_descriptor

MAX_RECORD_BYTES = 2**24  # bytes of one record: labels may be long, but not that long


def open_for_writing_refusing_links(path: Path) -> int:
    """Opens or creates a file for writing; a symbolic or hard link is an OSError, since another file would change."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | SAFE_OPEN_FLAGS, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise OSError(f"{path} is a link or not a regular file; expected a regular file without links")
    return descriptor


def create_empty_file(path: Path) -> BinaryIO:
    """Creates an empty file; an existing link is removed, not its target."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_OPEN_FLAGS, 0o666), "wb")


class AppendOnlyFile:
    """A file to which complete records are added, each written as soon as `add` returns."""

    def __init__(self, path: Path, size: int) -> None:
        """Truncate the file to `size`: what follows is an incomplete record."""
        self.handle = open_for_writing_refusing_links(path)
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
        with os.fdopen(open_regular_file_descriptor(path), "rb") as file:
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
