"""Results of commands: text or JSON on stdout, a table in a file, or files in a folder."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError
from vitrail.base.files import make_writable_folder, refuse_existing_outputs
from vitrail.base.kinds import Messages
from vitrail.base.table import TABLE_SUFFIXES, Table
from vitrail.cli.output.messages import print_error, print_note, print_text
from vitrail.cli.output.streams import get_binary_buffer

if TYPE_CHECKING:
    from vitrail.base.figures import FigureFolder


def split_output(out: Path | None) -> tuple[Path | None, Path | None]:
    """The folder or the file for the table that -o names, the other is None: a new NAME.md and so on is a table."""
    is_table = out is not None and out.suffix.lower() in TABLE_SUFFIXES and not out.is_dir()
    return (None, out) if is_table else (out, None)


def prepare_output(out: Path | None, files: Iterable[str], *, overwrite: bool) -> None:
    """Fail before the work if the table, or the files of a folder, cannot be written."""
    folder, table = split_output(out)
    prepare_figure_folder(folder, files, overwrite=overwrite)
    if table is not None:
        refuse_existing_outputs([table], overwrite=overwrite)
        make_writable_folder(table.parent)


def print_result(
    result: object,
    table: Table,
    report: Mapping[str, Any],
    out: Path | None,
    write: Callable[[Path], list[Path]],
    *,
    as_json: bool,
) -> None:
    """Print the result as text, or the report as JSON. With -o, write the table to its file, or files by `write`."""
    folder, table_file = split_output(out)
    if table_file is not None:
        table.write(table_file)
    written = [table_file] if table_file is not None else [] if folder is None else write(folder)
    print_report(result, report, written, as_json=as_json)


def prepare_figure_folder(folder: Path | None, files: Iterable[str], *, overwrite: bool) -> None:
    """Fail before the work if files exist, the folder cannot be written or figures cannot be drawn."""
    if folder is None:
        return
    from vitrail.base.figures import new_figure

    refuse_existing_outputs((folder / name for name in files), overwrite=overwrite)
    make_writable_folder(folder)
    new_figure(1, 1)


def make_message_callbacks(on_result: Callable[[object], object] = print) -> Messages:
    """The messages of commands: results on stdout, everything else on stderr."""
    from vitrail.cli.output.progress import progress_bar

    return Messages(
        on_result=on_result,
        on_note=print_note,
        on_error=print_error,
        progress=progress_bar,
        stdin=get_binary_buffer(sys.stdin),
    )


def check_output_file(option: str, path: Path | None, suffixes: Sequence[str], *, overwrite: bool) -> None:
    """Fail before the work if the name of a file has another suffix, or is taken."""
    if path is None:
        return
    kind = path.suffix.lower()
    if kind not in suffixes and (kind != ".htm" or ".html" not in suffixes):
        raise ConfigError(f"{option} {path}; expected a file name that ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; expected the name of a file")
    refuse_existing_outputs([path], overwrite=overwrite)


def open_figure_output(out: Path, title: str, *, svg: bool, arrays: bool, overwrite: bool) -> "FigureFolder":
    """By the suffix of `out`: a page for .html, one figure for .png, .svg or .pdf; otherwise a folder of figures."""
    from mimetypes import MimeTypes

    from vitrail.base.figures import FIGURE_SUFFIXES, FigureFile, FigureFolder
    from vitrail.report.html_page import FigurePage

    kind = out.suffix.lower()
    is_page = kind in (".html", ".htm")
    if out.is_dir() and (is_page or kind in FIGURE_SUFFIXES):
        raise ConfigError(f"-o {out} is a folder; expected the name of a new file, or of a folder without {kind}")
    if is_page and (svg or arrays):
        flag = "--svg" if svg else "--arrays"
        raise ConfigError(
            f"{flag} with the page {out}, which is a single file; expected a folder, such as -o {out.stem}"
        )
    if is_page:
        return FigurePage(path=out, overwrite=overwrite, title=title)
    kinds = dict.fromkeys([out.suffix if kind in FIGURE_SUFFIXES else ".png", *[".svg"] * svg])
    if kind in FIGURE_SUFFIXES:
        return FigureFile(path=out, kinds=tuple(kinds), arrays=arrays, overwrite=overwrite)
    if MimeTypes().guess_type(out.name)[0] and not out.is_dir():
        raise ConfigError(f"-o {out}; expected a page (.html), one figure ({', '.join(FIGURE_SUFFIXES)}), or a folder")
    return FigureFolder(path=out, kinds=tuple(kinds), arrays=arrays, overwrite=overwrite)


def print_report(result: object, report: Mapping[str, Any], written: Sequence[Path], *, as_json: bool) -> None:
    """The result as text and the files written, or only JSON."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_text("\n\n".join([str(result), *([f"written: {', '.join(map(str, written))}"] if written else [])]))
