"""Rows of text in a file or on a terminal: predictions, translations, captions.

A file is gathered row by row in OUT.partial, as CSV or as JSON lines, and OUT appears when it is complete.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal

from vitrail.base.text import format_csv_line
from vitrail.predict.output.partial_folder import PartialFolder, WritingError
from vitrail.predict.output.resumable_rows import (
    CompletedItems,
    Record,
    ResumableRows,
    Row,
    encode_utf8,
    format_json_line,
)

RowFormat = Literal["table", "text", "json", "jsonl", "csv", "tsv", "parquet"]
ROW_SUFFIXES = {"text": "txt"}  # where the suffix of a format is not its name


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How records are written in each format."""

    kind: RowFormat
    columns: Sequence[str] = ()  # of a CSV or TSV file
    list_cells: Callable[[Record], Sequence[str]] = lambda _: ()  # in CSV or TSV, without formulas
    format_text: Callable[[Record], str] = lambda _: ""  # the lines of a text file
    write_parquet: Callable[[Iterator[Record], BinaryIO], object] | None = None
    spaced: bool = False  # an empty line between two rows on a terminal
    gathered_as_csv: bool = False  # in OUT.partial; otherwise as JSON lines

    @property
    def file_name(self) -> str:
        return f"rows.{ROW_SUFFIXES.get(self.kind, self.kind)}"

    def partial_folder(self, out: Path) -> PartialFolder:
        return PartialFolder(out, {self.file_name: out})

    @property
    def header(self) -> str:
        return self.format_cells(self.columns) if self.kind in ("csv", "tsv") else ""

    def format_cells(self, cells: Sequence[str]) -> str:
        return "\t".join(cells) + "\n" if self.kind == "tsv" else format_csv_line(cells)

    def format_record(self, record: Record) -> str:
        if self.kind in ("csv", "tsv"):
            return self.format_cells(self.list_cells(record))
        return self.format_text(record) if self.kind == "text" else format_json_line(record)


class RowFile:
    """A file of rows in the folder of an open job."""

    def __init__(self, partial: PartialFolder, layout: RowLayout) -> None:
        self.partial, self.layout = partial, layout
        columns = layout.columns if layout.gathered_as_csv else ()
        self.rows = ResumableRows(partial, f"rows.{'csv' if columns else 'jsonl'}", columns)
        self.done, self.failed = self.rows.done, self.rows.failed

    def write(self, row: Row) -> None:
        layout = self.layout
        line = layout.format_record(row.value) if layout.gathered_as_csv else format_json_line(row.value)
        self.rows.write(row, line)

    def close(self) -> None:
        self.rows.close()

    def finish(self) -> None:
        path = self.partial.folder / self.layout.file_name
        if path != self.rows.path:
            with self.partial.convert_write_errors():
                written = count()
                records = (record for (record, _), _ in zip(self.rows.read_records(), written, strict=False))
                with path.open("wb") as file:
                    write_records(records, self.layout, file)
                if next(written) != self.rows.log.count:
                    raise WritingError(
                        f"{self.rows.path} was damaged while the job ran; use `resume` to compute the rest"
                    )
        self.partial.finish()


def write_records(records: Iterator[Record], layout: RowLayout, file: BinaryIO) -> None:
    if layout.kind == "parquet":
        assert layout.write_parquet is not None, "only predictions are written as parquet"
        layout.write_parquet(records, file)
    elif layout.kind == "json":
        start = "["
        for record in records:
            file.write(encode_utf8(f"{start}\n{format_json_line(record)[:-1]}"))
            start = ","
        file.write(b"[]\n" if start == "[" else b"\n]\n")
    else:
        file.write(encode_utf8(layout.header))
        for record in records:
            file.write(encode_utf8(layout.format_record(record)))


class RowPrinter:
    """Writes rows at once, to a terminal or a pipe; has the methods of a file of rows."""

    failed = 0

    def __init__(self, layout: RowLayout, write_text: Callable[[str], object]) -> None:
        self.layout, self.write_text, self.rows = layout, write_text, 0
        self.done = CompletedItems((), ())
        if layout.header:
            write_text(layout.header)

    def write(self, row: Row) -> None:
        if self.layout.kind in ("table", "text"):
            text: Any = row.shown
            if text is None:  # an error has no place in a table, and is reported elsewhere
                return
            text = "\n" * bool(self.layout.spaced and self.rows) + text
        elif self.layout.kind == "json":
            text = f"{',' if self.rows else '['}\n{format_json_line(row.value)[:-1]}"
        else:
            text = self.layout.format_record(row.value)
        self.write_text(text)
        self.rows += 1

    def close(self) -> None:
        """Nothing to close."""

    def finish(self) -> None:
        if self.layout.kind == "json":
            self.write_text("\n]\n" if self.rows else "[]\n")


def open_row_sink(
    layout: RowLayout, partial: PartialFolder | None, write_text: Callable[[str], object]
) -> RowFile | RowPrinter:
    """A file in the folder of an open job, or a printer if there is none."""
    return RowPrinter(layout, write_text) if partial is None else RowFile(partial, layout)
