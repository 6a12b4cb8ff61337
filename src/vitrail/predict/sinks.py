"""Answers as rows, in every format; and row by row to whoever reads along."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import ConfigError, VitrailError
from vitrail.predict.answers import Answer
from vitrail.predict.ledger import Done

Format = Literal["table", "json", "jsonl", "csv", "parquet"]
FORMULA = (*"=+-@\t\r\n＝＋－＠",)  # full-width forms, too: some spreadsheets treat them alike
QUOTED = set(',;|\t"\r\n')
ENDINGS: dict[str, Format] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}


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


class Printed:
    """Rows for whoever reads along: a terminal, a pipe."""

    failed = 0

    def __init__(self, kind: Format, top: int, put: Callable[[str], object]) -> None:
        self.kind, self.top, self.put, self.rows = kind, top, put, 0
        self.done = Done((), ())
        if kind == "csv":
            put(csv_line(heading(top)))

    def write(self, name: str, error: str | None, answers: Sequence[Answer], _: int = 0) -> None:
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
    found = [
        text
        for each in answers
        for text in (safe_text(each.label or ""), str(each.index), str(short(each.probability)))
    ]
    return [safe_name(name), safe_text(error or ""), *found, *[""] * (3 * top - len(found))]


def safe_name(name: str) -> str:
    """The name of the same file that no spreadsheet takes for a formula; `-` alone is standard input."""
    return f"./{name}" if name.startswith(FORMULA) and name != "-" else name


def safe_text(text: str) -> str:
    """A text that no spreadsheet takes for a formula: an apostrophe is put before one that begins like a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def csv_line(fields: Sequence[str]) -> str:
    """Quotes fields where needed, also around characters that other readers take for separators."""
    quoted = (f'"{each.replace(chr(34), 2 * chr(34))}"' if set(each) & QUOTED else each for each in fields)
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
