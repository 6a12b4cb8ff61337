"""Predictions as rows of text in every format, and a printer that writes them one by one."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from vitrail.base.errors import ConfigError, missing_package_error
from vitrail.base.text import FORMULA_STARTS, escape_formula_in_text, escape_unprintable, format_csv_line
from vitrail.predict.output.completed_images import CompletedImages
from vitrail.predict.predictions import ClassProbability, format_probabilities

PredictionFormat = Literal["table", "json", "jsonl", "csv", "parquet"]
Format = TypeVar("Format", bound=str)
FORMAT_BY_SUFFIX: dict[str, PredictionFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}


def choose_format(out: Path, given: Format | None, by_suffix: Mapping[str, Format]) -> Format:
    """The given format, by default that of the suffix of `out`."""
    found = given or by_suffix.get(out.suffix.lower())
    if found is None:
        raise ConfigError(
            f"`out` {out} has none of the suffixes {', '.join(by_suffix)}; use one of them, or set `format`"
        )
    return found


def choose_prediction_format(out: Path | None, given: PredictionFormat | None) -> PredictionFormat:
    """As `choose_format`; without a file a table by default."""
    if out is None and given == "parquet":
        raise ConfigError("`format` parquet needs a file: set `out` OUT.parquet")
    if out is not None and given == "table":
        raise ConfigError(f"`format` table is for terminals; expected csv, jsonl, json or parquet for `out` {out}")
    return given or "table" if out is None else choose_format(out, given, FORMAT_BY_SUFFIX)


class PredictionPrinter:
    """Writes rows at once, to a terminal or a pipe; has the methods of a file of predictions."""

    failed = 0

    def __init__(
        self, kind: PredictionFormat, top: int, write_text: Callable[[str], object], *, single: bool = False
    ) -> None:
        self.kind, self.top, self.write_text, self.rows = kind, top, write_text, 0
        self.single = single  # a table of one image does not repeat its name
        self.done = CompletedImages((), ())
        if kind == "csv":
            write_text(format_csv_line(list_column_names(top)))

    def write(self, name: str, error: str | None, top_classes: Sequence[ClassProbability], _: int = 0) -> None:
        if self.kind == "csv":
            self.write_text(format_csv_line(make_csv_fields(name, error, top_classes, self.top)))
        elif self.kind == "jsonl":
            self.write_text(format_json_line(make_json_record(name, error, top_classes)))
        elif self.kind == "json":
            self.write_text(
                f"{',' if self.rows else '['}\n{format_json_line(make_json_record(name, error, top_classes))[:-1]}"
            )
        elif error is None:  # a table has no place for errors, which are reported elsewhere
            table = format_class_table(top_classes, None if self.single else name)
            self.write_text(table if self.rows == 0 else f"\n{table}")
        self.rows += error is None or self.kind != "table"

    def close(self) -> None:
        """Nothing to close."""

    def finish(self) -> None:
        if self.kind == "json":
            self.write_text("\n]\n" if self.rows else "[]\n")


def make_json_record(name: str, error: str | None, top_classes: Sequence[ClassProbability]) -> dict[str, Any]:
    if error is not None:
        return {"file": name, "error": error}
    top = [
        {"index": each.index, "label": each.label, "probability": round_probability(each.probability)}
        for each in top_classes
    ]
    return {"file": name, "top": top}


def format_json_line(row: Mapping[str, Any]) -> str:
    """JSON as UTF-8 text; as ASCII if a file name is not valid UTF-8, so that it can be restored."""
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
    """Write the name as ./=name, the same file, if a spreadsheet would take it for a formula; `-` is standard input."""
    return f"./{name}" if name.startswith(FORMULA_STARTS) and name != "-" else name


def format_class_table(top_classes: Sequence[ClassProbability], name: str | None = None) -> str:
    """The top classes of an image, one per line, below its name if one is given."""
    lines = format_probabilities(top_classes)
    if name is not None:
        lines = [escape_unprintable(name), *(f"  {line}" for line in lines)]
    return "".join(f"{line}\n" for line in lines)


def round_probability(probability: float) -> float:
    """Six digits, the precision of a float32."""
    return float(f"{probability:.6g}")


def is_utf8_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_utf8(text: str) -> bytes:
    """Encode as UTF-8; a file name that is not valid UTF-8 keeps its bytes."""
    return text.encode("utf-8", "surrogateescape")


def escape_surrogates(name: str) -> str:
    """Escape the bytes of a name that is not valid UTF-8, as Python does: strings in parquet are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_package_error("a parquet file", "pyarrow", "embed") from None
    return pyarrow, pyarrow.parquet
