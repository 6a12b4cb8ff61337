"""Results of commands: notes on stderr, text or JSON on stdout, files in a folder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.cli.output.messages import print_notes, print_text


def prepare_figure_folder(folder: Path | None, files: Iterable[str], *, overwrite: bool) -> None:
    """Fail before the work if files exist, the folder cannot be written or figures cannot be drawn."""
    if folder is None:
        return
    from vitrail.figures import new_figure
    from vitrail.files import make_writable_folder, refuse_existing_outputs

    refuse_existing_outputs((folder / name for name in files), overwrite=overwrite)
    make_writable_folder(folder)
    new_figure(1, 1)


def print_report(result: object, report: Mapping[str, Any], written: Sequence[Path], *, as_json: bool) -> None:
    """The result as text and the files written, or only JSON."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_text("\n\n".join([str(result), *([f"written: {', '.join(map(str, written))}"] if written else [])]))


def write_and_print_benchmark(found: Any, out: Path | None, *, as_json: bool, tables: Sequence[str] = ()) -> None:
    """The results of a benchmark: notes, then the machine and the tables, or only JSON. Writes its files to `out`."""
    print_notes(found.notes)
    written = [] if out is None else found.write(out)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    print_text("\n".join(map(str, (found.environment, found, *tables))))
    if written:
        print(f"\nwritten: {', '.join(map(str, written))}")
