"""Where answers go: to a file that appears whole at the end, gathered row by row until then."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.predict.answers import Answer
from vitrail.predict.growing import Growing, csv_records, json_records, open_empty
from vitrail.predict.ledger import Ledger
from vitrail.predict.resuming import LEDGER, Partial, WritingError
from vitrail.predict.sinks import (
    Format,
    csv_fields,
    csv_line,
    encoded,
    heading,
    json_line,
    plain_text,
    pyarrow,
    record,
)

GROUP = 10_000  # rows of a parquet file that are held at once


def partial_for(out: Path, kind: Format) -> Partial:
    """Where the rows are gathered until all are there."""
    return Partial(out, {f"rows.{kind}": out})


class RowFile:
    """Rows in a file: gathered as they come, as CSV if that is asked for and as JSON lines otherwise."""

    def __init__(self, partial: Partial, kind: Format, top: int, job: Mapping[str, Any], *, resume: bool) -> None:
        self.partial, self.kind, self.top = partial, kind, top
        partial.open(job, resume=resume)
        self.rows = partial.folder / ("rows.csv" if kind == "csv" else "rows.jsonl")
        self.failed, self.end = 0, 0
        with partial.faults():
            self.ledger = Ledger(partial.folder / LEDGER)
            self.accept_rows()
            self.done = self.ledger.open()
            self.file = Growing(self.rows, self.end)
            if kind == "csv" and not self.end:
                self.file.add(encoded(csv_line(heading(top))))

    def accept_rows(self) -> None:
        """Counts the rows written before, up to the first damaged row: from there on they are computed again."""
        if self.kind == "csv":
            names = heading(self.top)
            for number, (fields, line) in enumerate(csv_records(self.rows, len(names))):
                if fields != names if number == 0 else not self.ledger.accept(line):
                    return
                self.end += len(line)
                self.failed += number > 0 and fields[1] != ""
        else:
            for row, line in json_records(self.rows):
                if not self.ledger.accept(line):
                    return
                self.end += len(line)
                self.failed += "error" in row

    def write(self, name: str, error: str | None, answers: Sequence[Answer], stamp: int = 0) -> None:
        """`stamp` identifies the state of the image's file when it was read."""
        if self.kind == "csv":
            line = csv_line(csv_fields(name, error, answers, self.top))
        else:
            line = json_line(record(name, error, answers))
        with self.partial.faults():
            self.file.add(encoded(line))
            self.ledger.add(name, stamp, encoded(line))

    def close(self) -> None:
        self.file.close()
        self.ledger.close()
        self.partial.close()

    def finish(self) -> None:
        self.file.close()
        with self.partial.faults():
            if self.kind in ("json", "parquet"):
                written = Counted(row for row, _ in json_records(self.rows))
                with open_empty(self.partial.folder / f"rows.{self.kind}") as file:
                    if self.kind == "json":
                        write_json(written, file)
                    else:
                        write_parquet(written, self.top, file)
                if written.count != self.ledger.count:
                    raise WritingError(f"{self.rows} was damaged while the job ran; resume with --resume")
        self.partial.finish()


class Counted:
    """An iterator that counts its items."""

    def __init__(self, rows: Iterator[Mapping[str, Any]]) -> None:
        self.rows, self.count = rows, 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        row = next(self.rows)
        self.count += 1
        return row


def write_json(rows: Iterable[Mapping[str, Any]], file: BinaryIO) -> None:
    start = "["
    for row in rows:
        file.write(encoded(f"{start}\n{json_line(row)[:-1]}"))
        start = ","
    file.write(b"[]\n" if start == "[" else b"\n]\n")


def write_parquet(rows: Iterator[Mapping[str, Any]], top: int, place: BinaryIO) -> None:
    """The columns of the CSV file, a group of rows at a time; the error of a picture that has none is null."""
    arrow, parquet = pyarrow()
    kinds = {"label": arrow.string(), "index": arrow.int32(), "probability": arrow.float32()}
    names = heading(top)
    schema = arrow.schema([(name, kinds.get(name.rpartition("_")[0], arrow.string())) for name in names])
    with parquet.ParquetWriter(place, schema) as file:
        while group := list(islice(rows, GROUP)):
            columns: list[list[Any]] = [[plain_text(row["file"]) for row in group], [row.get("error") for row in group]]
            for n in range(top):
                answers = [row["top"][n] if n < len(row.get("top", ())) else {} for row in group]
                columns += [[each.get(name) for each in answers] for name in kinds]
            file.write_table(arrow.table(dict(zip(names, columns, strict=True)), schema=schema))
