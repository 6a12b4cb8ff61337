"""What commands print next to their results: notes and errors on stderr, rows on stdout."""

import sys
from collections.abc import Iterable

from vitrail.base.errors import VitrailError
from vitrail.base.text import escape_unprintable
from vitrail.cli import name_options
from vitrail.cli.output.streams import get_binary_buffer

FIELDS_IN_NOTES = ("resume", "overwrite", "data", "init", "epochs", "val_share", "pair", "part", "trust_code")


def print_line(text: str) -> None:
    """Print a line of a report immediately."""
    print(escape_unprintable(name_options(text, FIELDS_IN_NOTES), keep="\n"), flush=True)


def print_text(text: str) -> None:
    """A report of several lines, in which names from files cannot control the terminal."""
    print(escape_unprintable(name_options(text, ("trust_code",)), keep="\n"))


def print_note(text: str) -> None:
    print(f"vitrail: note: {escape_unprintable(name_options(text, FIELDS_IN_NOTES))}", file=sys.stderr)


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print_note(note)


def print_error(error: VitrailError) -> None:
    print(f"vitrail: {name_options(str(error), error.fields)}", file=sys.stderr)


def write_to_stdout(text: str) -> None:
    """Write at once; into a pipe, file names that are not valid UTF-8 keep their bytes."""
    buffer = None if sys.stdout.isatty() else get_binary_buffer(sys.stdout)
    if buffer is None:
        print(text, end="", flush=True)
    else:
        buffer.write(text.encode("utf-8", "surrogateescape"))
        buffer.flush()
