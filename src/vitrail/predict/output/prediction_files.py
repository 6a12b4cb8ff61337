"""A file of predictions: rows are gathered one by one in OUT.partial, and OUT appears when it is complete."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.base.text import format_csv_line
from vitrail.predict.output.append_only_files import create_empty_file
from vitrail.predict.output.partial_folder import PartialFolder, WritingError
from vitrail.predict.output.resumable_rows import ResumableRows
from vitrail.predict.output.row_formats import (
    PredictionFormat,
    encode_utf8,
    escape_surrogates,
    format_json_line,
    import_pyarrow,
    list_column_names,
    make_csv_fields,
    make_json_record,
)
from vitrail.predict.predictions import ClassProbability

ROWS_PER_GROUP = 10_000  # rows of a parquet file in memory


def partial_folder_for_predictions(out: Path, kind: PredictionFormat) -> PartialFolder:
    return PartialFolder(out, {f"rows.{kind}": out})


class PredictionFile:
    """The top classes of each image, gathered as CSV for a CSV file and as JSON lines for the other formats."""

    def __init__(
        self, partial: PartialFolder, kind: PredictionFormat, top: int, job: Mapping[str, Any], *, resume: bool
    ) -> None:
        self.partial, self.kind, self.top = partial, kind, top
        partial.open_job(job, resume=resume)
        csv = kind == "csv"
        self.rows = ResumableRows(partial, f"rows.{'csv' if csv else 'jsonl'}", list_column_names(top) if csv else ())
        self.done, self.failed = self.rows.done, self.rows.failed

    def write(self, name: str, error: str | None, top_classes: Sequence[ClassProbability], stamp: int = 0) -> None:
        """`stamp` identifies the state of the image's file when it was read."""
        if self.kind == "csv":
            line = format_csv_line(make_csv_fields(name, error, top_classes, self.top))
        else:
            line = format_json_line(make_json_record(name, error, top_classes))
        self.rows.write(name, stamp, line)

    def close(self) -> None:
        self.rows.close()

    def finish(self) -> None:
        with self.partial.convert_write_errors():
            if self.kind in ("json", "parquet"):
                written = CountingIterator(row for row, _ in self.rows.read_records())
                with create_empty_file(self.partial.folder / f"rows.{self.kind}") as file:
                    if self.kind == "json":
                        write_json_array(written, file)
                    else:
                        write_parquet(written, self.top, file)
                if written.count != self.rows.log.count:
                    raise WritingError(
                        f"{self.rows.path} was damaged while the job ran; use `resume` to compute the rest"
                    )
        self.partial.finish()


class CountingIterator:
    """An iterator that counts its items."""

    def __init__(self, rows: Iterator[Mapping[str, Any]]) -> None:
        self.rows, self.count = rows, 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        row = next(self.rows)
        self.count += 1
        return row


def write_json_array(rows: Iterable[Mapping[str, Any]], file: BinaryIO) -> None:
    start = "["
    for row in rows:
        file.write(encode_utf8(f"{start}\n{format_json_line(row)[:-1]}"))
        start = ","
    file.write(b"[]\n" if start == "[" else b"\n]\n")


def write_parquet(rows: Iterator[Mapping[str, Any]], top: int, place: BinaryIO) -> None:
    """The columns of the CSV file; an image without an error has null there."""
    arrow, parquet = import_pyarrow()
    kinds = {"label": arrow.string(), "index": arrow.int32(), "probability": arrow.float32()}
    names = list_column_names(top)
    schema = arrow.schema([(name, kinds.get(name.rpartition("_")[0], arrow.string())) for name in names])
    with parquet.ParquetWriter(place, schema) as file:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            columns: list[list[Any]] = [
                [escape_surrogates(row["file"]) for row in group],
                [row.get("error") for row in group],
            ]
            for n in range(top):
                predicted = [row["top"][n] if n < len(row.get("top", ())) else {} for row in group]
                columns += [[each.get(name) for each in predicted] for name in kinds]
            file.write_table(arrow.table(dict(zip(names, columns, strict=True)), schema=schema))
