"""What `eval` and `compare` found, for people and for machines."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def prepare_figure_folder(folder: Path | None, files: Iterable[str], *, overwrite: bool) -> None:
    """Fail before the work if files exist, the folder cannot be written or figures cannot be drawn."""
    if folder is None:
        return
    from vitrail.figures import new_figure
    from vitrail.files import check_output_paths, make_writable_folder

    check_output_paths((folder / name for name in files), overwrite=overwrite)
    make_writable_folder(folder)
    new_figure(1, 1)


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
