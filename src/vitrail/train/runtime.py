"""What belongs to the process of a run and not to the run: device, workers, threads, and where lines are reported."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

from vitrail.distributed import Ranks
from vitrail.tasks.task import ignore_line, no_progress_bar


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What belongs to this process and not to the run, so that it may differ when the run is resumed."""

    device: str = "auto"
    workers: int | None = None  # None: as many as help
    threads: int | Literal["auto"] = "auto"  # auto: measured at the start; a resumed run keeps its number
    strict: bool = False  # an unreadable example is an error
    report: Callable[[str], object] = ignore_line  # receives the lines that describe the run
    progress: Callable[[int | None, str], AbstractContextManager[Callable[[int], object]]] = no_progress_bar

    def for_rank(self, ranks: Ranks) -> "Runtime":
        """Only the first of several processes reports."""
        return self if ranks.is_first else replace(self, report=ignore_line, progress=no_progress_bar)

    def report_lines(self, *lines: str) -> None:
        for line in lines:
            self.report(line)
