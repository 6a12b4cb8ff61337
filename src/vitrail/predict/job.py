"""Items in, a file of rows out; a job can be interrupted and resumed, and no row is lost or written twice.

The commands `predict`, `embed`, `translate` and `caption` are this class with options from the command line. What
differs is the source of the rows: predictions, features, maps (`image_rows.py`), translations, captions
(`text_rows.py`).
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, ClassVar, Protocol

from vitrail.base.errors import DataError
from vitrail.base.text import format_count
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.output.resumable_rows import CompletedItems, Row


class Sink(Protocol):
    """Where rows go: a file in OUT.partial, or a terminal."""

    done: CompletedItems  # the items of earlier runs
    failed: int  # of these, without a result

    def write(self, row: Row) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ItemSummary:
    """How many items there are, and what is wrong with the arguments."""

    total: int
    problems: Sequence[str] = ()  # arguments without items
    notes: Sequence[str] = ()

    @property
    def is_single(self) -> bool:
        """Whether one item was named, and nothing else."""
        return self.total == 1 and not self.problems


@dataclass(frozen=True, kw_only=True)
class OpenRows:
    """A model that is open, with the items of a job."""

    # the rows of all items that are not done, in order; the number of items is passed to the progress
    iterate: Callable[[CompletedItems, Callable[[int], object]], Iterator[Row]]
    describe: Callable[[], Mapping[str, Any]]  # what must be the same when the job is resumed, for job.json
    open_sink: Callable[[Callable[[str], object]], Sink]  # without a file, rows are passed to the given function


class RowSource(Protocol):
    """A model and its items, images or sentences, and the kind of rows to write."""

    noun: ClassVar[str]  # what an item is called
    failure: ClassVar[str]  # what is said of items without a result

    def plan_output(self, out: Path | None) -> PartialFolder | None:
        """The folder for unfinished results; ConfigError if there is no such format."""
        ...

    def list_items(self, stdin: BinaryIO | None) -> Any:
        """The items that the arguments name."""
        ...

    def summarize(self, items: Any) -> ItemSummary:
        """Count them; DataError if there are none."""
        ...

    def open(
        self, items: Any, summary: ItemSummary, partial: PartialFolder | None, on_note: Callable[[str], object]
    ) -> OpenRows:
        """Open the model for these items."""
        ...


@dataclass(frozen=True)
class JobResult:
    """What a job did, including the rows of earlier runs that it resumed."""

    out: Path | None
    total: int = 0  # items
    failed: int = 0  # items without a result; their rows say why
    problems: Sequence[str] = ()  # arguments without items
    seconds: float = 0.0  # of this run
    resumed: int = 0  # items of earlier runs
    was_complete: bool = False  # there was nothing left to resume
    error: DataError | None = None  # if some items have no result

    def raise_if_failed(self) -> None:
        """DataError if some items have no result; the results of all others are complete."""
        if self.error is not None:
            raise self.error


def ignore_message(_: object) -> None:
    """Drop a message."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A source of rows, and a file for them."""

    rows: RowSource
    out: Path | None = None  # None: rows are passed to `write_text`
    resume: bool = False  # continue with the rows in OUT.partial
    overwrite: bool = False  # replace OUT
    stdin: BinaryIO | None = None  # for the argument -
    write_text: Callable[[str], object] = ignore_message
    on_note: Callable[[str], object] = ignore_message
    on_error: Callable[[DataError], object] = ignore_message  # an item without a result
    progress: Callable[[int], AbstractContextManager[Callable[[int], object]]] = lambda _: nullcontext(ignore_message)

    def run(self) -> JobResult:
        """Process all items; those without a result are reported and counted, and their rows say why."""
        partial = self.rows.plan_output(self.out)
        items = self.rows.list_items(self.stdin)
        with nullcontext() if partial is None else closing(partial):
            if partial is not None and partial.start(resume=self.resume, overwrite=self.overwrite):
                self.on_note(f"{partial.out} is already complete; use `overwrite` to start over")
                return JobResult(self.out, was_complete=True)
            summary = self.rows.summarize(items)
            for problem in summary.problems:
                self.on_error(DataError(problem))
            for note in summary.notes:
                self.on_note(note)
            with self.report_interrupt(partial):
                opened = self.rows.open(items, summary, partial, self.on_note)
                if partial is not None:
                    partial.open_job(opened.describe(), resume=self.resume)
                with closing(opened.open_sink(self.write_text)) as sink:
                    return self.write_rows(opened, summary, sink)

    def write_rows(self, opened: OpenRows, summary: ItemSummary, sink: Sink) -> JobResult:
        failed, resumed, start = sink.failed, len(sink.done), monotonic()
        if resumed:
            done = format_count(resumed, self.rows.noun)
            self.on_note(f"resuming: {done} done, of which {failed} {self.rows.failure}")
        with self.progress(max(0, summary.total - resumed)) as advance:
            for row in opened.iterate(sink.done, advance):
                if row.error is not None:
                    if summary.is_single and self.out is None:
                        raise row.error
                    self.on_error(row.error)
                    failed += 1
                sink.write(row)
        sink.finish()
        seconds, error = monotonic() - start, self.make_error(failed, summary)
        return JobResult(self.out, summary.total, failed, summary.problems, seconds, resumed, error=error)

    def make_error(self, failed: int, summary: ItemSummary) -> DataError | None:
        counts = [f"{failed} of {format_count(summary.total, self.rows.noun)}"] * bool(failed)
        counts += [f"{len(summary.problems)} of the arguments"] * bool(summary.problems)
        others = "" if self.out is None or failed == summary.total else f"; the results of the others are in {self.out}"
        return DataError(f"{' and '.join(counts)} {self.rows.failure}{others}") if counts else None

    @contextmanager
    def report_interrupt(self, partial: PartialFolder | None) -> Generator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if partial is not None and (partial.has_job or partial.is_complete):
                self.on_note(f"stopped; finished rows are in {partial.folder}: run it again with `resume` to continue")
            raise
