"""A bar for whatever takes long."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int | None, title: str = "") -> Generator[Callable[[int], object]]:
    """A function to call with how many more are done; the bar is on stderr, if that is a terminal.

    `total` is None where it is not known, and 0 for no bar at all.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (console.is_terminal and total != 0)
    shared = sys.stdout.isatty()  # what is printed meanwhile goes above the bar, unless it goes to a file
    with Progress(*columns, console=console, transient=True, disable=disable, redirect_stdout=shared) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
