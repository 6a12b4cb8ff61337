"""A bar for whatever takes long."""

from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def progress(total: int | None, title: str = "") -> Generator[Callable[[int], object]]:
    """To be told of each so many that are done; drawn on stderr if that is a terminal, else nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and total != 0)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
