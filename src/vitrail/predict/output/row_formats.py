"""Rows as lines of CSV, TSV and JSON: quoted, without formulas, and with names that are not valid UTF-8 restorable."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from vitrail.base.errors import ConfigError, missing_package_error
from vitrail.base.text import FORMULA_STARTS

Format = TypeVar("Format", bound=str)


def choose_format(out: Path, given: Format | None, by_suffix: Mapping[str, Format]) -> Format:
    """The given format, by default that of the suffix of `out`."""
    found = given or by_suffix.get(out.suffix.lower())
    if found is None:
        raise ConfigError(
            f"`out` {out} has none of the suffixes {', '.join(by_suffix)}; use one of them, or set `format`"
        )
    return found


def format_json_line(row: Mapping[str, Any]) -> str:
    """JSON as UTF-8 text; as ASCII if a file name is not valid UTF-8, so that it can be restored."""
    line = json.dumps(row, ensure_ascii=False)
    return f"{line if is_utf8_encodable(line) else json.dumps(row)}\n"


def make_single_line(text: str) -> str:
    """A text without line breaks, of any kind: one line per row."""
    return " ".join(text.splitlines())


def escape_formula_in_path(name: str) -> str:
    """Write the name as ./=name, the same file, if a spreadsheet would take it for a formula; `-` is standard input."""
    return f"./{name}" if name.startswith(FORMULA_STARTS) and name != "-" else name


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
