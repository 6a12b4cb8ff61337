"""The rows of an unfinished job: appended one by one, and kept up to the first damaged one when the job is resumed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from vitrail.base.text import format_csv_line
from vitrail.predict.output.append_only_files import AppendOnlyFile, read_csv_records, read_json_records
from vitrail.predict.output.completed_images import CompletionLog
from vitrail.predict.output.partial_folder import COMPLETION_LOG_FILE, PartialFolder
from vitrail.predict.output.row_formats import encode_utf8

Row = Mapping[str, Any]


class ResumableRows:
    """A file of rows in the folder of an open job: CSV with these columns, or JSON lines if there are none."""

    def __init__(
        self,
        partial: PartialFolder,
        file_name: str,
        columns: Sequence[str] = (),
        read_values: Callable[[Row], bytes | None] = lambda _: b"",
    ) -> None:
        """`read_values` reads what belongs to a row and is stored elsewhere; None if it is missing."""
        self.partial, self.columns, self.failed = partial, columns, 0
        self.path = partial.folder / file_name
        with ExitStack() as stack:
            stack.callback(partial.close)
            with partial.convert_write_errors():
                self.log = CompletionLog(partial.folder / COMPLETION_LOG_FILE)
                stack.callback(self.log.close)
                end = self.accept_rows(read_values)
                self.done = self.log.open_for_appending()
                self.file = AppendOnlyFile(self.path, end)
                stack.callback(self.file.close)
                if not end:
                    self.file.add(self.header)
            self.opened = stack.pop_all()

    @property
    def header(self) -> bytes:
        return encode_utf8(format_csv_line(self.columns)) if self.columns else b""

    def accept_rows(self, read_values: Callable[[Row], bytes | None]) -> int:
        """Accept the rows written before, up to the first damaged one; return where they end in the file."""
        records, end = self.read_records(), 0
        if self.columns:
            _, first = next(records, ({}, b""))
            if first != self.header:
                return 0
            end = len(first)
        for row, line in records:
            values = read_values(row)
            if values is None or not self.log.accept_next_row(line, values):
                break
            end += len(line)
            self.failed += bool(row.get("error"))
        return end

    def read_records(self) -> Iterator[tuple[Row, bytes]]:
        """Each row and its bytes; of a CSV file the header, too."""
        if not self.columns:
            return read_json_records(self.path)
        records = read_csv_records(self.path, len(self.columns))
        return ((dict(zip(self.columns, fields, strict=True)), line) for fields, line in records)

    def write(self, name: str, stamp: int, line: str, values: bytes = b"") -> None:
        """`stamp` identifies the state of the image's file when it was read."""
        with self.partial.convert_write_errors():
            self.file.add(encode_utf8(line))
            self.log.add(name, stamp, encode_utf8(line), values)

    def close(self) -> None:
        self.opened.close()
