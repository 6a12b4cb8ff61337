"""Progress bars: one line on a terminal, HTML in a notebook, nothing in a script that nobody watches."""

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from html import escape
from importlib import import_module
from threading import Timer
from time import monotonic
from typing import Any

from vitrail.base.text import format_duration

MIN_SECONDS = 0.5  # before a bar appears
ANNOUNCE_SECONDS = 5.0  # before a line says what is done, where nobody sees a bar
REFRESH_SECONDS = 0.25  # between two updates of a notebook
Advance = Callable[[int], object]  # called with the number of items that are done
Progress = bool | Advance | None  # an argument: a function, or whether there is a bar; None: if someone sees it


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None  # the shell of a terminal has no kernel


def is_watched() -> bool:
    """Whether someone sees a bar: in a notebook, or if stderr is a terminal."""
    return in_notebook() or bool(sys.stderr and sys.stderr.isatty())


def track_progress(progress: Progress, total: int | None, title: str = "") -> AbstractContextManager[Advance]:
    return nullcontext(progress) if callable(progress) else progress_bar(total, title, show=progress)


@contextmanager
def progress_bar(total: int | None, title: str = "", *, show: bool | None = None) -> Generator[Advance]:
    """A function that advances the bar by a number of items; work that is done in half a second shows no bar.

    `total` is None if it is unknown, and 0 for no bar. By default, `show` is None: there is a bar in a notebook, and if
    stderr is a terminal.
    """
    if show is False or total == 0 or (show is None and not is_watched()):
        yield lambda _: None
        return
    bar = DelayedBar(total, title)
    try:
        yield bar.advance
    finally:
        bar.close()


class SlowLine:
    """A line on stderr about work that takes longer than a few seconds, unless it is canceled before."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.timer = Timer(ANNOUNCE_SECONDS, self.write)
        self.timer.daemon = True
        self.timer.start()

    def write(self) -> None:
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed
            sys.stderr.write(f"{self.text}\n")
            sys.stderr.flush()

    def cancel(self) -> None:
        self.timer.cancel()


class DelayedBar:
    """Counts items, and opens a bar for the notebook or the terminal once the work takes long enough."""

    def __init__(self, total: int | None, title: str) -> None:
        self.total, self.title, self.done, self.start = total, title, 0, monotonic()
        self.bar: TerminalBar | NotebookBar | None = None

    def advance(self, count: int) -> None:
        self.done += count
        if self.bar is None and monotonic() - self.start >= MIN_SECONDS:
            self.bar = (NotebookBar if in_notebook() else TerminalBar)(self.total, self.title)
        if self.bar is not None:
            self.bar.update(self.done)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class TerminalBar:
    """A line on stderr, which disappears at the end if it is a terminal."""

    def __init__(self, total: int | None, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console, shared = Console(stderr=True), sys.stdout.isatty()  # printed lines go above the bar
        transient = console.is_terminal  # elsewhere only the last state is written
        self.progress = Progress(*columns, console=console, transient=transient, redirect_stdout=shared)
        self.task = self.progress.add_task(title, total=total)
        self.progress.start()

    def update(self, done: int) -> None:
        self.progress.update(self.task, completed=done)

    def close(self) -> None:
        self.progress.stop()


class NotebookBar:
    """A bar as HTML, replaced in place; it needs no widgets. `done` items do not count for the time left."""

    def __init__(self, total: int | None, title: str, done: int = 0) -> None:
        self.total, self.title, self.done_before = total, title, done
        self.start, self.last_update = monotonic(), 0.0
        display: Any = import_module("IPython.display")  # present in every notebook
        self.make_html: Callable[[str], Any] = display.HTML
        self.handle: Any = display.display(self.make_html(""), display_id=True)

    def update(self, done: int, note: str = "", lines: str = "") -> None:
        """Show the number of items that are done, a note next to it and lines below it."""
        now = monotonic()
        if now - self.last_update >= REFRESH_SECONDS or done == self.total:
            self.last_update = now
            new = done - self.done_before
            left = (now - self.start) / new * (self.total - done) if self.total and new > 0 else None
            shown = format_html_bar(self.title, done, self.total, note, left)
            self.handle.update(self.make_html(shown + (f"<pre>{escape(lines)}</pre>" if lines else "")))

    def close(self, lines: str = "") -> None:
        """Replace the bar by lines, or remove it."""
        self.handle.update(self.make_html(f"<pre>{escape(lines)}</pre>" if lines else ""))


def format_html_bar(title: str, done: int, total: int | None, note: str = "", seconds_left: float | None = None) -> str:
    value = f'value="{done}" max="{total}" ' if total else ""  # without a value, the bar moves back and forth
    count = f"{done:,}/{total:,}" if total else f"{done:,}"
    left = "" if seconds_left is None else f"{format_duration(seconds_left)} left"
    words = escape("  ".join(filter(None, (count, note, left))))
    return (
        f'<div style="font-family: system-ui, sans-serif">{escape(title)} '
        f'<progress {value}style="width: 16em; vertical-align: middle"></progress> {words}</div>'
    )
