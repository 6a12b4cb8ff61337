"""What `eval` and `compare` found, for people and for machines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json_report(report: Mapping[str, Any], path: Path) -> None:
    from vitrail.files import write_atomically

    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda place: place.write_text(text, "utf-8"))


def print_report(result: object, report: Mapping[str, Any], written: Sequence[Path], *, as_json: bool) -> None:
    """The result as text and where it was written, or nothing but JSON."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print("\n\n".join([str(result), *([f"written: {', '.join(map(str, written))}"] if written else [])]))
