"""A file of features: arrays for numpy or a parquet file, with the names of the images; complete at the end."""

import os
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.base.array_file import HEADER_BYTES, make_npy_header, parse_npy_header
from vitrail.base.errors import CheckpointError
from vitrail.base.text import escape_formula_in_text, format_csv_line
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.output.resumable_rows import (
    AppendOnlyFile,
    Record,
    ResumableRows,
    Row,
    escape_formula_in_path,
    escape_surrogates,
    import_pyarrow,
)

FeatureFormat = Literal["npy", "parquet", "npz"]  # npz: one array per level of a model, for feature maps
FEATURE_FORMAT_BY_SUFFIX: dict[str, FeatureFormat] = {".npy": "npy", ".parquet": "parquet"}
MAPS_FORMAT_BY_SUFFIX: dict[str, FeatureFormat] = {".npz": "npz"}
GROUP_BYTES = 2**24  # bytes of features in memory while a parquet file is written
NAMES_FILE, ARRAY_FILE, PARQUET_FILE, MAPS_FILE = "files.csv", "features.npy", "features.parquet", "maps.npz"
NAMES_COLUMNS = ("file", "row", "error")


def names_file_path(out: Path) -> Path:
    """features.npy has the names of its rows in features.files.csv: file, row, error."""
    return out.with_suffix(".files.csv")


def partial_folder_for_features(out: Path, kind: FeatureFormat) -> PartialFolder:
    if kind == "parquet":
        return PartialFolder(out, {PARQUET_FILE: out})
    return PartialFolder(out, {NAMES_FILE: names_file_path(out), (ARRAY_FILE if kind == "npy" else MAPS_FILE): out})


class StoredFeatures:
    """Reads the rows of an array that a job has written so far, in order."""

    def __init__(self, file: BinaryIO | None) -> None:
        """Without a file, or with a damaged header, there are no rows."""
        self.file, self.next_row = file, 0
        header = None if file is None else parse_npy_header(file.read(HEADER_BYTES))
        self.shape = () if header is None else header[1:]
        self.row_bytes = 4 * prod(self.shape) if self.shape else 0
        size = os.fstat(file.fileno()).st_size if file is not None else 0
        self.count = (size - HEADER_BYTES) // self.row_bytes if self.row_bytes else 0

    def read_values(self, record: Record) -> bytes | None:
        """The features of a row of the names; None if they are missing, b"" for an image that failed."""
        if not record["row"]:
            return b""
        if self.file is None or self.next_row >= self.count or record["row"] != str(self.next_row):
            return None
        self.next_row += 1
        return self.file.read(self.row_bytes)


@contextmanager
def open_stored_features(path: Path) -> Generator[StoredFeatures]:
    if not path.exists():
        yield StoredFeatures(None)
        return
    with path.open("rb") as file:
        yield StoredFeatures(file)


class FeatureFile:
    """The features of each image that could be read, in an array (rows, …), and the names of the rows.

    The rows of an npz file are split into one array per level, whose maps have the `levels`' shapes.
    """

    def __init__(self, partial: PartialFolder, kind: FeatureFormat, levels: Sequence[tuple[int, ...]] = ()) -> None:
        self.partial, self.kind, self.levels = partial, kind, levels
        self.array_path = partial.folder / ARRAY_FILE
        with partial.close_on_error(), partial.convert_write_errors():
            with open_stored_features(self.array_path) as stored:
                self.names = ResumableRows(partial, NAMES_FILE, NAMES_COLUMNS, stored.read_values)
            self.done, self.failed = self.names.done, self.names.failed
            self.rows = len(self.done) - self.failed
            self.shape = stored.shape if self.rows else None  # a header is trusted if a row matches its digest
            end = HEADER_BYTES + self.rows * stored.row_bytes if self.rows else 0
            self.array = AppendOnlyFile(self.array_path, end)

    def write(self, row: Row) -> None:
        values: NDArray[np.float32] | None = row.value
        number, data = ("", b"") if values is None else (str(self.rows), values.astype("<f4").tobytes())
        message = "" if values is not None else str(row.error or "no features")
        if self.kind != "parquet":  # a parquet file takes its names from here, unescaped
            fields = (escape_formula_in_path(row.name), number, escape_formula_in_text(message))
        else:
            fields = (row.name, number, message)
        if values is not None and self.shape is None:
            self.shape = values.shape
            with self.partial.convert_write_errors():
                self.array.add(make_npy_header((0, *self.shape)))
        if values is not None and values.shape != self.shape:
            raise CheckpointError(
                f"the model returned features of shape {values.shape} for {row.name!r}, but {self.shape} before; "
                "expected one shape for all images"
            )
        with self.partial.convert_write_errors():
            self.array.add(data)  # before the name, so that a name without its numbers is computed again
        self.names.write(row, format_csv_line(fields), data)
        self.rows += values is not None

    def close(self) -> None:
        self.array.close()
        self.names.close()

    def finish(self) -> None:
        with self.partial.convert_write_errors():
            if self.shape is None:
                self.shape = (0,)
                self.array.add(make_npy_header((0, *self.shape)))
            self.array.replace_start(make_npy_header((self.rows, *self.shape)))
            self.array.close()
            if self.kind == "parquet":
                self.write_parquet(self.shape)
            if self.kind == "npz":
                self.write_maps()
        self.partial.finish()

    def write_maps(self) -> None:
        """Arrays level1, level2, …: (rows, D, h, w), from the finest to the coarsest."""
        width = sum(prod(shape) for shape in self.levels)
        file_size = HEADER_BYTES + 4 * width * self.rows
        rows = np.memmap(self.array_path, np.uint8, "r", shape=(file_size,))[HEADER_BYTES:]  # which may be empty
        rows = rows.view("<f4").reshape(self.rows, width)
        many = max(1, GROUP_BYTES // (4 * width))
        start = 0
        with zipfile.ZipFile(self.partial.folder / MAPS_FILE, "w") as archive:
            for level, shape in enumerate(self.levels, start=1):
                end = start + prod(shape)
                with archive.open(zipfile.ZipInfo(f"level{level}.npy"), "w", force_zip64=True) as file:
                    file.write(make_npy_header((self.rows, *shape)))
                    for first in range(0, self.rows, many):
                        file.write(rows[first : first + many, start:end].tobytes())
                start = end

    def write_parquet(self, shape: tuple[int, ...]) -> None:
        """Columns file, error, features: lists of floats, lists of lists for tokens, null for images that failed."""
        arrow, parquet = import_pyarrow()
        kind = arrow.float32()
        for side in reversed(shape):
            kind = arrow.list_(kind, side)
        schema = arrow.schema([("file", arrow.string()), ("error", arrow.string()), ("features", kind)])
        many = max(1, GROUP_BYTES // (4 * max(1, prod(shape))))
        rows = (row for row, _ in islice(self.names.read_records(), 1, None))
        with (
            self.array_path.open("rb") as numbers,
            (self.partial.folder / PARQUET_FILE).open("wb") as place,
            parquet.ParquetWriter(place, schema) as file,
        ):
            numbers.seek(HEADER_BYTES)
            while group := list(islice(rows, many)):
                present = np.array([row["row"] != "" for row in group])
                values = np.zeros((len(group), *shape), "<f4")
                if present.any():
                    read = numbers.read(4 * prod(shape) * int(present.sum()))
                    values[present] = np.frombuffer(read, "<f4").reshape(-1, *shape)
                columns = {
                    "file": [escape_surrogates(row["file"]) for row in group],
                    "error": [row["error"] or None for row in group],
                    "features": make_list_column(arrow, values, present),
                }
                file.write_table(arrow.table(columns, schema=schema))


def make_list_column(arrow: Any, values: NDArray[np.float32], present: NDArray[np.bool_]) -> Any:
    """An array (rows, …) as a column of nested lists, without converting it to Python's lists."""
    if not present.any():
        return [None] * len(present)
    column = arrow.array(values.reshape(-1))
    for side in values.shape[:1:-1]:
        column = arrow.FixedSizeListArray.from_arrays(column, side)
    return arrow.FixedSizeListArray.from_arrays(column, values.shape[1], mask=arrow.array(~present))
