"""A progress bar on stderr."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int | None, title: str = "") -> Generator[Callable[[int], object]]:
    """A function that advances the bar by a number of items. There is a bar only on a terminal.

    `total` is None if it is unknown, and 0 for no bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (console.is_terminal and total != 0)
    shared = sys.stdout.isatty()  # printed lines go above the bar
    with Progress(*columns, console=console, transient=True, disable=disable, redirect_stdout=shared) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
