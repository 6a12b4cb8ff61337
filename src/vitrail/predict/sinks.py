"""Where answers go: row by row to a stream, or to a file that appears whole at the end."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import ConfigError, VitrailError
from vitrail.predict.answers import Answer
from vitrail.predict.resuming import Done, Growing, Partial, csv_records, json_records

Format = Literal["table", "json", "jsonl", "csv", "parquet"]
ENDINGS: dict[str, Format] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
GROUP = 10_000  # rows of a parquet file that are held at once


def format_for(out: Path | None, given: Format | None) -> Format:
    """As given, else by the ending of the file's name, else a table to be read."""
    if out is None:
        if given == "parquet":
            raise ConfigError("--format parquet to a terminal or a pipe; expected a file for it: -o OUT.parquet")
        return given or "table"
    if given == "table":
        raise ConfigError(f"--format table with -o {out}; expected csv, jsonl, json or parquet: a table is to be read")
    found = given or ENDINGS.get(out.suffix.lower())
    if found is None:
        raise ConfigError(f"-o {out} says no format; expected one of {', '.join(ENDINGS)}, or --format")
    return found


def partial_for(out: Path, kind: Format) -> Partial:
    """Where the rows are gathered until all are there."""
    return Partial(out, {f"rows.{kind}": out})


class Printed:
    """Rows for whoever reads along: a terminal, a pipe."""

    done, failed = Done(()), 0

    def __init__(self, kind: Format, top: int, put: Callable[[str], object]) -> None:
        self.kind, self.top, self.put, self.rows = kind, top, put, 0
        if kind == "csv":
            put(csv_line(heading(top)))

    def write(self, name: str, error: str | None, answers: Sequence[Answer]) -> None:
        if self.kind == "csv":
            self.put(csv_line(csv_fields(name, error, answers, self.top)))
        elif self.kind == "jsonl":
            self.put(json_line(record(name, error, answers)))
        elif self.kind == "json":
            self.put(f"{',' if self.rows else '['}\n{json_line(record(name, error, answers))[:-1]}")
        elif error is None:  # a table has no place for errors, which are told elsewhere
            self.put(f"{'' if self.rows == 0 else chr(10)}{table(name, answers)}")
        self.rows += error is None or self.kind != "table"

    def close(self) -> None:
        """There is nothing to keep."""

    def finish(self) -> None:
        if self.kind == "json":
            self.put("\n]\n" if self.rows else "[]\n")


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


def record(name: str, error: str | None, answers: Sequence[Answer]) -> dict[str, Any]:
    if error is not None:
        return {"file": name, "error": error}
    top = [{"index": each.index, "label": each.label, "probability": short(each.probability)} for each in answers]
    return {"file": name, "top": top}


def json_line(row: Mapping[str, Any]) -> str:
    """Readable text, unless a name is no text: then as ASCII, from which it can be had again."""
    line = json.dumps(row, ensure_ascii=False)
    return f"{line if is_text(line) else json.dumps(row)}\n"


def heading(top: int) -> list[str]:
    return ["file", "error", *(f"{name}_{n}" for n in range(1, top + 1) for name in ("label", "index", "probability"))]


def csv_fields(name: str, error: str | None, answers: Sequence[Answer], top: int) -> list[str]:
    found = [text for each in answers for text in (each.label or "", str(each.index), str(short(each.probability)))]
    return [name, error or "", *found, *[""] * (3 * top - len(found))]


def csv_line(fields: Sequence[str]) -> str:
    """Quoted where needed; a carriage return, too, which Python's writer leaves bare."""
    quoted = (f'"{each.replace(chr(34), 2 * chr(34))}"' if set(each) & set(',"\r\n') else each for each in fields)
    return f"{','.join(quoted)}\n"


def table(name: str, answers: Sequence[Answer]) -> str:
    """A picture's name and its likeliest classes, the numbers first: any label fits in the end."""
    lines = [f"  {each.probability:7.2%}  {each.index:5}  {each.label or ''}".rstrip() for each in answers]
    return "".join(f"{shown(line)}\n" for line in (name, *lines))


def shown(text: str) -> str:
    """Names may hold anything."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def short(probability: float) -> float:
    """What a float32 is worth writing out."""
    return float(f"{probability:.6g}")


def is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encoded(text: str) -> bytes:
    """UTF-8; a name that is none is the bytes that the disk has."""
    return text.encode("utf-8", "surrogateescape")


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


def plain_text(name: str) -> str:
    """A name that is no text, as Python writes it: parquet's strings are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise VitrailError("parquet needs pyarrow, which is not installed: pip install vitrail[embed]") from None
    return pyarrow, pyarrow.parquet
