"""Features of images on disk: computed once per model, images, preprocessing and layer, and memory-mapped.

A file is a .npy file of float32 (rows, D) with a description appended, which numpy ignores: a checksum of the rows, and
the images that could not be read, which have no row. Damaged files are computed again.
"""

import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail import __version__
from vitrail.base.errors import CheckpointError, OutputError, describe_error
from vitrail.base.files import get_cache_folder, make_writable_folder, open_regular_file_descriptor, sync_to_disk
from vitrail.base.json_yaml import add_checksum, parse_json, verify_and_remove_checksum
from vitrail.base.npy_header import HEADER_BYTES, make_npy_header, parse_npy_header
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSubset, ImageDataset
from vitrail.data.images.formats.class_folders import FileDataset

CACHE_FOLDER = "features"
TRAILER_PREFIX = b"\nvitrail:"  # precedes the description at the end of a file
MAX_TRAILER_BYTES = 2**26
IMAGES_AT_ONCE = 4096  # of arrays


@dataclass(frozen=True)
class StoredRows:
    """Features in a file, one row per readable image, and why the other images could not be read."""

    rows: NDArray[np.float32]  # (N, D), memory-mapped
    unreadable: dict[int, str]  # by index in the data set

    def select_readable(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values, one per image of the data set, of the images that have a row."""
        return np.delete(values, list(self.unreadable))


def get_feature_cache_folder() -> Path | None:
    """A folder for features that are kept; None if it cannot be written."""
    with suppress(CheckpointError):
        folder = get_cache_folder() / CACHE_FOLDER
        make_writable_folder(folder)
        return folder
    return None


def compute_file_name(source_digest: str, data_digest: str) -> str:
    return hashlib.sha256(f"{__version__} {source_digest} {data_digest}".encode()).hexdigest()[:32] + ".npy"


def compute_data_digest(dataset: ImageDataset) -> str | None:
    """Digest of the images in their order: pixels of arrays, else name, size and times of each file.

    None for a data set of another library, whose images are not known before they are read.
    """
    indices: Any = range(len(dataset))
    inner = dataset
    if isinstance(dataset, DatasetSubset):
        inner, indices = dataset.dataset, dataset.indices
    found = hashlib.sha256()
    if isinstance(inner, ArrayDataset):
        found.update(repr((len(indices), inner.images.shape[1:])).encode())
        for start in range(0, len(indices), IMAGES_AT_ONCE):
            found.update(np.ascontiguousarray(inner.images[indices[start : start + IMAGES_AT_ONCE]]).data)
        return found.hexdigest()
    if not isinstance(inner, FileDataset):
        return None
    for index in indices:
        path = inner.source(int(index))
        try:
            about = path.stat()
            stamp = f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"  # cp -p keeps the first time
        except OSError:  # reported when it is read
            stamp = "missing"
        found.update(f"{path.absolute()} {stamp}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


class FeatureWriter:
    """Appends rows to a temporary file, which `finish` renames to `path`; `discard` deletes it."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.temporary = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
        self.shape, self.hash = (0, 0), hashlib.sha256()
        with self.convert_write_errors():
            self.file = self.temporary.open("xb")
            self.file.write(make_npy_header(self.shape))

    @contextmanager
    def convert_write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {describe_error(error)}; free some space") from None

    def append(self, rows: torch.Tensor) -> None:
        """Add rows (B, D)."""
        values = np.ascontiguousarray(rows.float().cpu().numpy(), "<f4")
        self.shape = (self.shape[0] + len(values), values.shape[1])
        self.hash.update(values.data)
        with self.convert_write_errors():
            self.file.write(values.data)

    def finish(self, unreadable: dict[int, str]) -> None:
        unreadable_pairs = [[index, reason] for index, reason in unreadable.items()]
        about = {**self.about, "rows": self.hash.hexdigest(), "unreadable": unreadable_pairs}
        with self.convert_write_errors():
            self.file.write(TRAILER_PREFIX + json.dumps(add_checksum(about)).encode())
            self.file.seek(0)
            self.file.write(make_npy_header(self.shape))
            self.file.close()
            sync_to_disk(self.temporary)
            self.temporary.replace(self.path)

    def discard(self) -> None:
        """Delete the temporary file, if it was not finished."""
        with suppress(OSError):  # the disk is full
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def open_stored_rows(path: Path, image_count: int) -> StoredRows | None:
    """Open a file and verify it; None if it is missing or damaged, so that it is computed again."""
    try:
        with os.fdopen(open_regular_file_descriptor(path), "rb") as file:
            shape = parse_npy_header(file.read(HEADER_BYTES))
            if shape is None or len(shape) != 2:
                return None
            end = HEADER_BYTES + 4 * shape[0] * shape[1]
            file.seek(end)
            trailer = file.read(MAX_TRAILER_BYTES)
            about = verify_and_remove_checksum(parse_json(trailer.removeprefix(TRAILER_PREFIX).decode()))
            unreadable = {int(index): str(reason) for index, reason in about["unreadable"]}
            fits = shape[0] + len(unreadable) == image_count and compute_rows_checksum(file, end) == about["rows"]
            if not fits or not all(0 <= index < image_count for index in unreadable):
                return None
            rows = np.zeros(shape, np.float32) if 0 in shape else np.memmap(file, "<f4", "r", HEADER_BYTES, shape)
            return StoredRows(rows, unreadable)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def compute_rows_checksum(file: Any, end: int) -> str:
    found = hashlib.sha256()
    file.seek(HEADER_BYTES)
    left = end - HEADER_BYTES
    while left and (part := file.read(min(left, 2**22))):
        found.update(part)
        left -= len(part)
    return found.hexdigest()
