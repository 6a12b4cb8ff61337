"""Where features go: to an array for numpy or a parquet file, with the names of the pictures; whole at the end."""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import CheckpointError, ConfigError
from vitrail.files import open_regular_file
from vitrail.predict.output.append_only_files import AppendOnlyFile, create_empty_file, read_csv_records
from vitrail.predict.output.completed_images import CompletionLog
from vitrail.predict.output.partial_folder import COMPLETION_LOG_FILE, PartialFolder
from vitrail.predict.output.row_formats import (
    encode_utf8,
    escape_formula_in_path,
    escape_formula_in_text,
    escape_surrogates,
    format_csv_line,
    import_pyarrow,
)

FeatureFormat = Literal["npy", "parquet"]
HEADER_BYTES = 128  # bytes before the numbers, as numpy itself has them
GROUP_BYTES = 2**24  # bytes of features that are held at once
NAMES_FILE, ARRAY_FILE, PARQUET_FILE = "files.csv", "features.npy", "features.parquet"
NAMES_HEADER = b"file,row,error\n"
SHAPE_PATTERN = re.compile(rb"'shape': \((\d{1,18}(?:, \d{1,18}){1,3})\)")


def choose_feature_format(out: Path, given: FeatureFormat | None) -> FeatureFormat:
    """As given, else by the ending of the file's name."""
    found = given or {".npy": "npy", ".parquet": "parquet"}.get(out.suffix.lower())
    if found not in ("npy", "parquet"):
        raise ConfigError(f"-o {out} says no format; expected .npy or .parquet, or --format")
    return found


def names_file_path(out: Path) -> Path:
    """features.npy has its names in features.files.csv: file, row, error."""
    return out.with_suffix(".files.csv")


def partial_folder_for_features(out: Path, kind: FeatureFormat) -> PartialFolder:
    return PartialFolder(
        out, {NAMES_FILE: names_file_path(out), ARRAY_FILE: out} if kind == "npy" else {PARQUET_FILE: out}
    )


class FeatureFile:
    """The features of each picture that has some, in an array (rows, …), and which row is whose."""

    def __init__(self, partial: PartialFolder, kind: FeatureFormat, job: Mapping[str, Any], *, resume: bool) -> None:
        self.partial, self.kind, self.failed, self.rows, self.end = partial, kind, 0, 0, 0
        partial.open_job(job, resume=resume)
        self.names_path, self.array_path = partial.folder / NAMES_FILE, partial.folder / ARRAY_FILE
        with partial.convert_write_errors():
            self.shape, stored = read_npy_header(self.array_path)
            self.completion_log = CompletionLog(partial.folder / COMPLETION_LOG_FILE)
            self.accept_existing_rows(stored)
            if not self.rows:
                self.shape = None  # the header of the array is not trusted unless a row matches
            self.done = self.completion_log.open_for_appending()
            self.names = AppendOnlyFile(self.names_path, self.end)
            if not self.end:
                self.names.add(NAMES_HEADER)
                self.end = len(NAMES_HEADER)
            self.array = AppendOnlyFile(self.array_path, 0 if self.shape is None else self.array_end)

    @property
    def array_end(self) -> int:
        return HEADER_BYTES + self.rows * 4 * prod(self.shape or ())

    def accept_existing_rows(self, stored: int) -> None:
        """Counts the images that are done and whose features are stored, up to the first damaged row."""
        size = 4 * prod(self.shape or (0,))
        with ExitStack() as stack:
            numbers = stack.enter_context(os.fdopen(open_regular_file(self.array_path), "rb")) if stored else None
            if numbers is not None:
                numbers.seek(HEADER_BYTES)
            for number, ((_, row, error), line) in enumerate(read_csv_records(self.names_path, 3)):
                if number == 0:
                    if line != NAMES_HEADER:
                        return
                else:
                    if row and (row != str(self.rows) or self.rows >= stored or numbers is None):
                        return
                    values = numbers.read(size) if row and numbers is not None else b""
                    if not self.completion_log.accept_next_row(line, values):
                        return
                    self.rows += row != ""
                    self.failed += error != ""
                self.end += len(line)

    def write(self, name: str, error: str | None, values: NDArray[np.float32] | None, stamp: int = 0) -> None:
        """`stamp` identifies the state of the image's file when it was read."""
        shown = (
            escape_formula_in_path(name) if self.kind == "npy" else name
        )  # parquet takes its names from here, unescaped
        row, numbers = ("", b"") if values is None else (str(self.rows), values.astype("<f4").tobytes())
        message = "" if values is not None else error or "no features"
        line = encode_utf8(
            format_csv_line((shown, row, escape_formula_in_text(message) if self.kind == "npy" else message))
        )
        if values is not None and self.shape is None:
            self.shape = values.shape
            with self.partial.convert_write_errors():
                self.array.add(make_npy_header(0, self.shape))
        if values is not None and values.shape != self.shape:
            raise CheckpointError(
                f"the model returned features of shape {values.shape} for {name!r}, but {self.shape} before; "
                "expected one shape for all images"
            )
        with self.partial.convert_write_errors():
            # first the values, then the name, then the ledger: a row that was cut off is computed again
            self.array.add(numbers)
            self.names.add(line)
            self.completion_log.add(name, stamp, line, numbers)
            self.rows += values is not None

    def close(self) -> None:
        self.completion_log.close()
        self.names.close()
        self.array.close()
        self.partial.close()

    def finish(self) -> None:
        with self.partial.convert_write_errors():
            if self.shape is None:
                self.shape = (0,)
                self.array.add(make_npy_header(0, self.shape))
            self.array.replace_start(make_npy_header(self.rows, self.shape))
            self.array.close()
            self.names.close()
            if self.kind == "parquet":
                self.write_parquet(self.shape)
        self.partial.finish()

    def write_parquet(self, shape: tuple[int, ...]) -> None:
        """file, error, features: a list of floats, of tokens a list of lists; null where there are none."""
        arrow, parquet = import_pyarrow()
        kind = arrow.float32()
        for side in reversed(shape):
            kind = arrow.list_(kind, side)
        schema = arrow.schema([("file", arrow.string()), ("error", arrow.string()), ("features", kind)])
        many = max(1, GROUP_BYTES // (4 * max(1, prod(shape))))
        lines = (fields for fields, _ in islice(read_csv_records(self.names_path, 3), 1, None))
        with (
            os.fdopen(open_regular_file(self.array_path), "rb") as numbers,
            create_empty_file(self.partial.folder / PARQUET_FILE) as place,
            parquet.ParquetWriter(place, schema) as file,
        ):
            numbers.seek(HEADER_BYTES)
            while group := list(islice(lines, many)):
                present = np.array([row != "" for _, row, _ in group])
                values = np.zeros((len(group), *shape), "<f4")
                if present.any():
                    read = numbers.read(4 * prod(shape) * int(present.sum()))
                    values[present] = np.frombuffer(read, "<f4").reshape(-1, *shape)
                columns = {
                    "file": [escape_surrogates(name) for name, _, _ in group],
                    "error": [error or None for _, _, error in group],
                    "features": make_list_column(arrow, values, present),
                }
                file.write_table(arrow.table(columns, schema=schema))


def make_list_column(arrow: Any, values: NDArray[np.float32], present: NDArray[np.bool_]) -> Any:
    """An array (rows, …) as lists of lists, without a detour by Python's."""
    if not present.any():
        return [None] * len(present)
    column = arrow.array(values.reshape(-1))
    for side in values.shape[:1:-1]:
        column = arrow.FixedSizeListArray.from_arrays(column, side)
    return arrow.FixedSizeListArray.from_arrays(column, values.shape[1], mask=arrow.array(~present))


def make_npy_header(rows: int, shape: tuple[int, ...]) -> bytes:
    """What stands before the numbers of a .npy file, always as long, so that the rows can be counted at the end."""
    about = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, *shape)}).encode()
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + about.ljust(HEADER_BYTES - 11) + b"\n"


def read_npy_header(path: Path) -> tuple[tuple[int, ...] | None, int]:
    """The shape of a picture's features and how many pictures' are whole; None where no start is there yet."""
    size = path.stat().st_size if path.exists() else 0
    if size < HEADER_BYTES:
        return None, 0
    with os.fdopen(open_regular_file(path), "rb") as file:
        start = file.read(HEADER_BYTES)
    sides = SHAPE_PATTERN.search(start)
    rows, *shape = map(int, sides[1].split(b",")) if sides else (0,)
    if start != make_npy_header(rows, tuple(shape)) or prod(shape) < 1:  # damaged: it is computed again
        return None, 0
    return tuple(shape), (size - HEADER_BYTES) // (4 * prod(shape))
