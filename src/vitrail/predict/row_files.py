"""Where answers go: to a file that appears whole at the end, gathered row by row until then."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from vitrail.predict.answers import Answer
from vitrail.predict.resuming import Done, Growing, Partial, csv_records, json_records
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
            self.done = Done(self.before())
            self.file = Growing(self.rows, self.end)
            if kind == "csv" and not self.end:
                self.file.add(encoded(csv_line(heading(top))))

    def before(self) -> Iterator[str]:
        """The names of the pictures done before, and how far the file is whole."""
        if self.kind == "csv":
            names = heading(self.top)
            for fields, end in csv_records(self.rows, len(names)):
                self.end = end
                if fields != names:
                    self.failed += fields[1] != ""
                    yield fields[0]
        else:
            for row, end in json_records(self.rows):
                self.end = end
                self.failed += "error" in row
                yield row["file"]

    def write(self, name: str, error: str | None, answers: Sequence[Answer]) -> None:
        if self.kind == "csv":
            line = csv_line(csv_fields(name, error, answers, self.top))
        else:
            line = json_line(record(name, error, answers))
        with self.partial.faults():
            self.file.add(encoded(line))

    def close(self) -> None:
        self.file.close()
        self.partial.close()

    def finish(self) -> None:
        self.file.close()
        with self.partial.faults():
            rows = (row for row, _ in json_records(self.rows))
            if self.kind == "json":
                write_json(rows, self.partial.folder / "rows.json")
            elif self.kind == "parquet":
                write_parquet(rows, self.top, self.partial.folder / "rows.parquet")
        self.partial.finish()


def write_json(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    with path.open("wb") as file:
        start = "["
        for row in rows:
            file.write(encoded(f"{start}\n{json_line(row)[:-1]}"))
            start = ","
        file.write(b"[]\n" if start == "[" else b"\n]\n")


def write_parquet(rows: Iterator[Mapping[str, Any]], top: int, path: Path) -> None:
    """The columns of the CSV file, a group of rows at a time; the error of a picture that has none is null."""
    arrow, parquet = pyarrow()
    kinds = {"label": arrow.string(), "index": arrow.int32(), "probability": arrow.float32()}
    names = heading(top)
    schema = arrow.schema([(name, kinds.get(name.rpartition("_")[0], arrow.string())) for name in names])
    with parquet.ParquetWriter(path, schema) as file:
        while group := list(islice(rows, GROUP)):
            columns: list[list[Any]] = [[plain_text(row["file"]) for row in group], [row.get("error") for row in group]]
            for n in range(top):
                answers = [row["top"][n] if n < len(row.get("top", ())) else {} for row in group]
                columns += [[each.get(name) for each in answers] for name in kinds]
            file.write_table(arrow.table(dict(zip(names, columns, strict=True)), schema=schema))
