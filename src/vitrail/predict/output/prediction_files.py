"""Where answers go: to a file that appears whole at the end, gathered row by row until then."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.predict.output.append_only_files import (
    AppendOnlyFile,
    create_empty_file,
    read_csv_records,
    read_json_records,
)
from vitrail.predict.output.completed_images import CompletionLog
from vitrail.predict.output.partial_folder import COMPLETION_LOG_FILE, PartialFolder, WritingError
from vitrail.predict.output.row_formats import (
    PredictionFormat,
    encode_utf8,
    escape_surrogates,
    format_csv_line,
    format_json_line,
    import_pyarrow,
    list_column_names,
    make_csv_fields,
    make_json_record,
)
from vitrail.predict.predictions import ClassProbability

ROWS_PER_GROUP = 10_000  # rows of a parquet file that are held at once


def partial_folder_for_predictions(out: Path, kind: PredictionFormat) -> PartialFolder:
    """Where the rows are gathered until all are there."""
    return PartialFolder(out, {f"rows.{kind}": out})


class PredictionFile:
    """Rows in a file: gathered as they come, as CSV if that is asked for and as JSON lines otherwise."""

    def __init__(
        self, partial: PartialFolder, kind: PredictionFormat, top: int, job: Mapping[str, Any], *, resume: bool
    ) -> None:
        self.partial, self.kind, self.top = partial, kind, top
        partial.open_job(job, resume=resume)
        self.rows = partial.folder / ("rows.csv" if kind == "csv" else "rows.jsonl")
        self.failed, self.end = 0, 0
        with partial.convert_write_errors():
            self.completion_log = CompletionLog(partial.folder / COMPLETION_LOG_FILE)
            self.accept_existing_rows()
            self.done = self.completion_log.open_for_appending()
            self.file = AppendOnlyFile(self.rows, self.end)
            if kind == "csv" and not self.end:
                self.file.add(encode_utf8(format_csv_line(list_column_names(top))))

    def accept_existing_rows(self) -> None:
        """Counts the rows written before, up to the first damaged row: from there on they are computed again."""
        if self.kind == "csv":
            names = list_column_names(self.top)
            for number, (fields, line) in enumerate(read_csv_records(self.rows, len(names))):
                if fields != names if number == 0 else not self.completion_log.accept_next_row(line):
                    return
                self.end += len(line)
                self.failed += number > 0 and fields[1] != ""
        else:
            for row, line in read_json_records(self.rows):
                if not self.completion_log.accept_next_row(line):
                    return
                self.end += len(line)
                self.failed += "error" in row

    def write(self, name: str, error: str | None, top_classes: Sequence[ClassProbability], stamp: int = 0) -> None:
        """`stamp` identifies the state of the image's file when it was read."""
        if self.kind == "csv":
            line = format_csv_line(make_csv_fields(name, error, top_classes, self.top))
        else:
            line = format_json_line(make_json_record(name, error, top_classes))
        with self.partial.convert_write_errors():
            self.file.add(encode_utf8(line))
            self.completion_log.add(name, stamp, encode_utf8(line))

    def close(self) -> None:
        self.file.close()
        self.completion_log.close()
        self.partial.close()

    def finish(self) -> None:
        self.file.close()
        with self.partial.convert_write_errors():
            if self.kind in ("json", "parquet"):
                written = CountingIterator(row for row, _ in read_json_records(self.rows))
                with create_empty_file(self.partial.folder / f"rows.{self.kind}") as file:
                    if self.kind == "json":
                        write_json_array(written, file)
                    else:
                        write_parquet(written, self.top, file)
                if written.count != self.completion_log.count:
                    raise WritingError(f"{self.rows} was damaged while the job ran; resume with --resume")
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
    """The columns of the CSV file, a group of rows at a time; the error of a picture that has none is null."""
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
                answers = [row["top"][n] if n < len(row.get("top", ())) else {} for row in group]
                columns += [[each.get(name) for each in answers] for name in kinds]
            file.write_table(arrow.table(dict(zip(names, columns, strict=True)), schema=schema))
