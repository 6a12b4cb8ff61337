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
from vitrail.files import open_regular
from vitrail.predict.growing import Growing, csv_records, open_empty
from vitrail.predict.ledger import Ledger
from vitrail.predict.resuming import LEDGER, Partial
from vitrail.predict.sinks import csv_line, encoded, plain_text, pyarrow, safe_name, safe_text

FeatureFormat = Literal["npy", "parquet"]
START = 128  # bytes before the numbers, as numpy itself has them
GROUP = 2**24  # bytes of features that are held at once
NAMES, ARRAY, PARQUET = "files.csv", "features.npy", "features.parquet"
HEADING = b"file,row,error\n"
SIDES = re.compile(rb"'shape': \((\d{1,18}(?:, \d{1,18}){1,3})\)")


def feature_format(out: Path, given: FeatureFormat | None) -> FeatureFormat:
    """As given, else by the ending of the file's name."""
    found = given or {".npy": "npy", ".parquet": "parquet"}.get(out.suffix.lower())
    if found not in ("npy", "parquet"):
        raise ConfigError(f"-o {out} says no format; expected .npy or .parquet, or --format")
    return found


def names_beside(out: Path) -> Path:
    """features.npy has its names in features.files.csv: file, row, error."""
    return out.with_suffix(".files.csv")


def features_partial(out: Path, kind: FeatureFormat) -> Partial:
    return Partial(out, {NAMES: names_beside(out), ARRAY: out} if kind == "npy" else {PARQUET: out})


class FeatureFile:
    """The features of each picture that has some, in an array (rows, …), and which row is whose."""

    def __init__(self, partial: Partial, kind: FeatureFormat, job: Mapping[str, Any], *, resume: bool) -> None:
        self.partial, self.kind, self.failed, self.rows, self.end = partial, kind, 0, 0, 0
        partial.open(job, resume=resume)
        self.names_path, self.array_path = partial.folder / NAMES, partial.folder / ARRAY
        with partial.faults():
            self.shape, stored = stored_rows(self.array_path)
            self.ledger = Ledger(partial.folder / LEDGER)
            self.accept_rows(stored)
            if not self.rows:
                self.shape = None  # the header of the array is not trusted unless a row matches
            self.done = self.ledger.open()
            self.names = Growing(self.names_path, self.end)
            if not self.end:
                self.names.add(HEADING)
                self.end = len(HEADING)
            self.array = Growing(self.array_path, 0 if self.shape is None else self.end_of_rows)

    @property
    def end_of_rows(self) -> int:
        return START + self.rows * 4 * prod(self.shape or ())

    def accept_rows(self, stored: int) -> None:
        """Counts the images that are done and whose features are stored, up to the first damaged row."""
        size = 4 * prod(self.shape or (0,))
        with ExitStack() as stack:
            numbers = stack.enter_context(os.fdopen(open_regular(self.array_path), "rb")) if stored else None
            if numbers is not None:
                numbers.seek(START)
            for number, ((_, row, error), line) in enumerate(csv_records(self.names_path, 3)):
                if number == 0:
                    if line != HEADING:
                        return
                else:
                    if row and (row != str(self.rows) or self.rows >= stored or numbers is None):
                        return
                    values = numbers.read(size) if row and numbers is not None else b""
                    if not self.ledger.accept(line, values):
                        return
                    self.rows += row != ""
                    self.failed += error != ""
                self.end += len(line)

    def write(self, name: str, error: str | None, values: NDArray[np.float32] | None, stamp: int = 0) -> None:
        """`stamp` identifies the state of the image's file when it was read."""
        shown = safe_name(name) if self.kind == "npy" else name  # parquet takes its names from here, unescaped
        row, numbers = ("", b"") if values is None else (str(self.rows), values.astype("<f4").tobytes())
        message = "" if values is not None else error or "no features"
        line = encoded(csv_line((shown, row, safe_text(message) if self.kind == "npy" else message)))
        if values is not None and self.shape is None:
            self.shape = values.shape
            with self.partial.faults():
                self.array.add(array_start(0, self.shape))
        if values is not None and values.shape != self.shape:
            raise CheckpointError(
                f"the model returned features of shape {values.shape} for {name!r}, but {self.shape} before; "
                "expected one shape for all images"
            )
        with self.partial.faults():
            # first the values, then the name, then the ledger: a row that was cut off is computed again
            self.array.add(numbers)
            self.names.add(line)
            self.ledger.add(name, stamp, line, numbers)
            self.rows += values is not None

    def close(self) -> None:
        self.ledger.close()
        self.names.close()
        self.array.close()
        self.partial.close()

    def finish(self) -> None:
        with self.partial.faults():
            if self.shape is None:
                self.shape = (0,)
                self.array.add(array_start(0, self.shape))
            self.array.replace_start(array_start(self.rows, self.shape))
            self.array.close()
            self.names.close()
            if self.kind == "parquet":
                self.write_parquet(self.shape)
        self.partial.finish()

    def write_parquet(self, shape: tuple[int, ...]) -> None:
        """file, error, features: a list of floats, of tokens a list of lists; null where there are none."""
        arrow, parquet = pyarrow()
        kind = arrow.float32()
        for side in reversed(shape):
            kind = arrow.list_(kind, side)
        schema = arrow.schema([("file", arrow.string()), ("error", arrow.string()), ("features", kind)])
        many = max(1, GROUP // (4 * max(1, prod(shape))))
        lines = (fields for fields, _ in islice(csv_records(self.names_path, 3), 1, None))
        with (
            os.fdopen(open_regular(self.array_path), "rb") as numbers,
            open_empty(self.partial.folder / PARQUET) as place,
            parquet.ParquetWriter(place, schema) as file,
        ):
            numbers.seek(START)
            while group := list(islice(lines, many)):
                present = np.array([row != "" for _, row, _ in group])
                values = np.zeros((len(group), *shape), "<f4")
                if present.any():
                    read = numbers.read(4 * prod(shape) * int(present.sum()))
                    values[present] = np.frombuffer(read, "<f4").reshape(-1, *shape)
                columns = {
                    "file": [plain_text(name) for name, _, _ in group],
                    "error": [error or None for _, _, error in group],
                    "features": nested(arrow, values, present),
                }
                file.write_table(arrow.table(columns, schema=schema))


def nested(arrow: Any, values: NDArray[np.float32], present: NDArray[np.bool_]) -> Any:
    """An array (rows, …) as lists of lists, without a detour by Python's."""
    if not present.any():
        return [None] * len(present)
    column = arrow.array(values.reshape(-1))
    for side in values.shape[:1:-1]:
        column = arrow.FixedSizeListArray.from_arrays(column, side)
    return arrow.FixedSizeListArray.from_arrays(column, values.shape[1], mask=arrow.array(~present))


def array_start(rows: int, shape: tuple[int, ...]) -> bytes:
    """What stands before the numbers of a .npy file, always as long, so that the rows can be counted at the end."""
    about = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, *shape)}).encode()
    return b"\x93NUMPY\x01\x00" + (START - 10).to_bytes(2, "little") + about.ljust(START - 11) + b"\n"


def stored_rows(path: Path) -> tuple[tuple[int, ...] | None, int]:
    """The shape of a picture's features and how many pictures' are whole; None where no start is there yet."""
    size = path.stat().st_size if path.exists() else 0
    if size < START:
        return None, 0
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(START)
    sides = SIDES.search(start)
    rows, *shape = map(int, sides[1].split(b",")) if sides else (0,)
    if start != array_start(rows, tuple(shape)) or prod(shape) < 1:  # damaged: it is computed again
        return None, 0
    return tuple(shape), (size - START) // (4 * prod(shape))
