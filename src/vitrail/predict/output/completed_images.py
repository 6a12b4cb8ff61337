"""The images of a job that are done: 24 bytes each, so that millions fit into memory.

Every row has digests of the image's name, of its file's size and modification time, and of the row itself. So a name
is found however it is escaped in the row, a replaced file is noticed, and a damaged row is computed again.
"""

import os
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.files import open_regular_file_descriptor
from vitrail.predict.output.append_only_files import AppendOnlyFile

RECORD_BYTES = 24  # bytes: name, file, row


class CompletedImages:
    """The images that are done, by name, with the stamps of their files at that time."""

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
        """Whether the image is done and its file was replaced or modified since."""
        place = self.find_index(name)
        return place is not None and int(self.stamps[place]) != stamp


class CompletionLog:
    """The file of these digests; one record is appended after each row."""

    def __init__(self, path: Path) -> None:
        """Reads the existing records; a truncated last record is ignored."""
        self.path, self.count, self.file = path, 0, None
        self.records = np.zeros((0, 3), np.uint64)
        if path.exists():
            with os.fdopen(open_regular_file_descriptor(path), "rb") as file:  # closes the descriptor, too
                data = file.read()
            self.records = np.frombuffer(data[: len(data) // RECORD_BYTES * RECORD_BYTES], "<u8").reshape(-1, 3)

    def accept_next_row(self, *row: bytes) -> bool:
        """Whether the next row matches its digest; if so it counts as done."""
        if self.count == len(self.records):
            return False
        name, stamp, seen = map(int, self.records[self.count])
        if seen != hash_to_integer(encode_name_and_stamp(name, stamp), *row):
            return False
        self.count += 1
        return True

    def open_for_appending(self) -> CompletedImages:
        """Keeps the accepted records and opens the file for more."""
        self.file = AppendOnlyFile(self.path, self.count * RECORD_BYTES)
        kept: Any = self.records[: self.count]
        self.records = np.zeros((0, 3), np.uint64)
        return CompletedImages(kept[:, 0], kept[:, 1])

    def add(self, name: str, stamp: int, *row: bytes) -> None:
        assert self.file is not None
        start = encode_name_and_stamp(hash_to_integer(os.fsencode(name)), stamp)
        self.file.add(start + hash_to_integer(start, *row).to_bytes(8, "little"))
        self.count += 1

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


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
