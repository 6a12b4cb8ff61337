"""The progress of commands, on stderr: a bar on a terminal, elsewhere a line about what takes long."""

from collections.abc import Generator
from contextlib import contextmanager

from vitrail.base import progress
from vitrail.base.progress import Advance, SlowLine, is_watched


@contextmanager
def progress_bar(total: int | None, title: str = "") -> Generator[Advance]:
    if total == 0 or is_watched():
        with progress.progress_bar(total, title) as advance:
            yield advance
        return
    line = SlowLine(f"{title or 'working'} …")
    try:
        yield lambda _: None
    finally:
        line.cancel()
