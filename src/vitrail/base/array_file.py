"""An array on disk that is filled row by row: a cache that survives kill -9, and that finds its damaged rows.

A .npy file of float32 (count, width) with one CRC-32 per row appended, which numpy ignores. A row is written before its
checksum, so after a kill it is either valid or missing. Checksums also depend on the index and on a description of
what the rows were computed from. Several processes can fill a file; missing and damaged rows are written again.
"""

import os
import re
import zlib
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import OutputError, VitrailError, describe_error
from vitrail.base.files import open_regular_file_descriptor, write_atomically
from vitrail.base.locks import wait_for_entry_lock

HEADER_BYTES = 128  # of .npy files, as numpy writes it for up to four sizes
MAGIC = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
HEADER_PATTERN = re.compile(  # numpy writes a comma before the closing brace
    re.escape(MAGIC)
    + rb"{'descr': '<f4', 'fortran_order': False, 'shape': \((\d{1,18}(?:, \d{1,18}){0,3}),?\)(?:, )?} *\n"
)


class ArrayFile:
    """Rows by index. `valid` are those that are written and intact; OutputError if the disk is full or unreadable."""

    def __init__(self, path: Path, count: int, description: str) -> None:
        """Open a file of `count` rows and verify it. It need not exist: the first `write` creates it."""
        self.path, self.count = path, count
        self.seed = zlib.crc32(description.encode("utf-8", "surrogateescape"))
        self.width = 0  # of a row; known when the file exists
        self.valid = np.zeros(count, np.bool_)
        self.damaged = 0  # rows that were written, but are not intact
        self.verify(range(count))

    def verify(self, rows: range) -> None:
        """Find out which of these rows are valid."""
        part = slice(rows.start, rows.stop)
        self.valid[part], self.width, self.damaged = False, 0, 0
        try:
            with os.fdopen(open_regular_file_descriptor(self.path), "rb") as file:
                self.width = self.read_width(file)
                if not self.width:
                    self.damaged = len(rows)
                    return
                file.seek(self.locate_checksum(rows.start))
                checksums = np.frombuffer(file.read(4 * len(rows)), "<u4")
                file.seek(self.locate_row(rows.start))
                found = [self.compute_checksum(index, file.read(4 * self.width)) for index in rows]
                self.valid[part] = checksums == np.array(found, np.uint32)
                self.damaged = int(((checksums != 0) & ~self.valid[part]).sum())
        except FileNotFoundError:
            pass
        except OSError as error:
            raise OutputError(f"{self.path} cannot be used: {describe_error(error)}") from None

    def read_width(self, file: BinaryIO) -> int:
        """The width in the header; 0 if the file is damaged."""
        shape = parse_npy_header(file.read(HEADER_BYTES))
        if shape is None or len(shape) != 2 or shape[0] != self.count:
            return 0
        size = HEADER_BYTES + 4 * self.count * (shape[1] + 1)
        return shape[1] if os.fstat(file.fileno()).st_size >= size else 0

    def compute_checksum(self, index: int, row: bytes | memoryview) -> int:
        return zlib.crc32(row, (self.seed + index) % 2**32) or 1  # 0: not written

    def locate_row(self, index: int) -> int:
        return HEADER_BYTES + 4 * self.width * index

    def locate_checksum(self, index: int) -> int:
        return self.locate_row(self.count) + 4 * index

    @contextmanager
    def lock(self, rows: range | None = None) -> Generator[NDArray[np.int64]]:
        """Wait until no other process fills these rows, by default all, and yield the indices of the missing ones."""
        name = self.path.name if rows is None else f"{self.path.name}.{rows.start}"
        rows = rows or range(self.count)
        with ExitStack() as stack:
            try:
                stack.enter_context(wait_for_entry_lock(self.path.with_name(name)))
            except VitrailError as error:
                raise OutputError(str(error)) from None
            self.verify(rows)
            yield rows.start + np.flatnonzero(~self.valid[rows.start : rows.stop])

    def write(self, indices: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Write rows (B, width) by index; they are complete when this returns."""
        values = np.ascontiguousarray(values, "<f4")
        if self.width != values.shape[1]:
            self.create(values.shape[1])
        try:
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                for index, row in zip(indices.tolist(), values, strict=True):
                    data = memoryview(row).cast("B")
                    write_at(descriptor, data, self.locate_row(index))
                    checksum = self.compute_checksum(index, data).to_bytes(4, "little")
                    write_at(descriptor, memoryview(checksum), self.locate_checksum(index))
                    self.valid[index] = True
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {describe_error(error)}; free some space") from None

    def create(self, width: int) -> None:
        """Replace the file by one without rows, unless another process has just done so."""

        def write_empty(path: Path) -> None:
            path.write_bytes(make_npy_header((self.count, width)))
            os.truncate(path, HEADER_BYTES + 4 * self.count * (width + 1))  # its zeros take no space yet

        with self.lock():
            if self.width != width:
                write_atomically(self.path, write_empty)
                self.verify(range(self.count))

    def open_rows(self) -> NDArray[np.float32]:
        """All rows, memory-mapped: (count, width). Use those that are valid."""
        if not self.count * self.width:
            return np.zeros((self.count, self.width), np.float32)
        return np.memmap(self.path, "<f4", "r", HEADER_BYTES, (self.count, self.width))


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def make_npy_header(shape: tuple[int, ...]) -> bytes:
    """The header of an array of that shape, always HEADER_BYTES long, so that it can be replaced after adding rows."""
    about = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    return MAGIC + about.ljust(HEADER_BYTES - len(MAGIC) - 1) + b"\n"


def parse_npy_header(start: bytes) -> tuple[int, ...] | None:
    """The shape in the first HEADER_BYTES of a file; None if it is not such a header."""
    found = HEADER_PATTERN.fullmatch(start) if len(start) == HEADER_BYTES else None
    return None if found is None else tuple(map(int, found[1].split(b", ")))
