"""Answers as rows, in every format; and row by row to whoever reads along."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import ConfigError, VitrailError
from vitrail.predict.output.completed_images import CompletedImages
from vitrail.predict.predictions import ClassProbability

PredictionFormat = Literal["table", "json", "jsonl", "csv", "parquet"]
FORMULA_STARTS = (*"=+-@\t\r\n＝＋－＠",)  # full-width forms, too: some spreadsheets treat them alike
CHARACTERS_TO_QUOTE = set(',;|\t"\r\n')
FORMAT_BY_SUFFIX: dict[str, PredictionFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}


def choose_prediction_format(out: Path | None, given: PredictionFormat | None) -> PredictionFormat:
    """As given, else by the ending of the file's name, else a table to be read."""
    if out is None:
        if given == "parquet":
            raise ConfigError("--format parquet to a terminal or a pipe; expected a file for it: -o OUT.parquet")
        return given or "table"
    if given == "table":
        raise ConfigError(f"--format table with -o {out}; expected csv, jsonl, json or parquet: a table is to be read")
    found = given or FORMAT_BY_SUFFIX.get(out.suffix.lower())
    if found is None:
        raise ConfigError(f"-o {out} says no format; expected one of {', '.join(FORMAT_BY_SUFFIX)}, or --format")
    return found


class PredictionPrinter:
    """Rows for whoever reads along: a terminal, a pipe."""

    failed = 0

    def __init__(self, kind: PredictionFormat, top: int, put: Callable[[str], object]) -> None:
        self.kind, self.top, self.put, self.rows = kind, top, put, 0
        self.done = CompletedImages((), ())
        if kind == "csv":
            put(format_csv_line(list_column_names(top)))

    def write(self, name: str, error: str | None, top_classes: Sequence[ClassProbability], _: int = 0) -> None:
        if self.kind == "csv":
            self.put(format_csv_line(make_csv_fields(name, error, top_classes, self.top)))
        elif self.kind == "jsonl":
            self.put(format_json_line(make_json_record(name, error, top_classes)))
        elif self.kind == "json":
            self.put(
                f"{',' if self.rows else '['}\n{format_json_line(make_json_record(name, error, top_classes))[:-1]}"
            )
        elif error is None:  # a table has no place for errors, which are told elsewhere
            self.put(f"{'' if self.rows == 0 else chr(10)}{format_class_table(name, top_classes)}")
        self.rows += error is None or self.kind != "table"

    def close(self) -> None:
        """There is nothing to keep."""

    def finish(self) -> None:
        if self.kind == "json":
            self.put("\n]\n" if self.rows else "[]\n")


def make_json_record(name: str, error: str | None, top_classes: Sequence[ClassProbability]) -> dict[str, Any]:
    if error is not None:
        return {"file": name, "error": error}
    top = [
        {"index": each.index, "label": each.label, "probability": round_probability(each.probability)}
        for each in top_classes
    ]
    return {"file": name, "top": top}


def format_json_line(row: Mapping[str, Any]) -> str:
    """Readable text, unless a name is no text: then as ASCII, from which it can be had again."""
    line = json.dumps(row, ensure_ascii=False)
    return f"{line if is_utf8_encodable(line) else json.dumps(row)}\n"


def list_column_names(top: int) -> list[str]:
    return ["file", "error", *(f"{name}_{n}" for n in range(1, top + 1) for name in ("label", "index", "probability"))]


def make_csv_fields(name: str, error: str | None, top_classes: Sequence[ClassProbability], top: int) -> list[str]:
    found = [
        text
        for each in top_classes
        for text in (
            escape_formula_in_text(each.label or ""),
            str(each.index),
            str(round_probability(each.probability)),
        )
    ]
    return [escape_formula_in_path(name), escape_formula_in_text(error or ""), *found, *[""] * (3 * top - len(found))]


def escape_formula_in_path(name: str) -> str:
    """The name of the same file that no spreadsheet takes for a formula; `-` alone is standard input."""
    return f"./{name}" if name.startswith(FORMULA_STARTS) and name != "-" else name


def escape_formula_in_text(text: str) -> str:
    """A text that no spreadsheet takes for a formula: an apostrophe is put before one that begins like a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def format_csv_line(fields: Sequence[str]) -> str:
    """Quotes fields where needed, also around characters that other readers take for separators."""
    quoted = (f'"{each.replace(chr(34), 2 * chr(34))}"' if set(each) & CHARACTERS_TO_QUOTE else each for each in fields)
    return f"{','.join(quoted)}\n"


def format_class_table(name: str, top_classes: Sequence[ClassProbability]) -> str:
    """A picture's name and its likeliest classes, the numbers first: any label fits in the end."""
    lines = [f"  {each.probability:7.2%}  {each.index:5}  {each.label or ''}".rstrip() for each in top_classes]
    return "".join(f"{escape_unprintable(line)}\n" for line in (name, *lines))


def escape_unprintable(text: str) -> str:
    """Names may hold anything."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def round_probability(probability: float) -> float:
    """What a float32 is worth writing out."""
    return float(f"{probability:.6g}")


def is_utf8_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_utf8(text: str) -> bytes:
    """UTF-8; a name that is none is the bytes that the disk has."""
    return text.encode("utf-8", "surrogateescape")


def escape_surrogates(name: str) -> str:
    """A name that is no text, as Python writes it: parquet's strings are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise VitrailError("parquet needs pyarrow, which is not installed: pip install vitrail[embed]") from None
    return pyarrow, pyarrow.parquet
