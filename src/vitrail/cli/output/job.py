"""Run a job of predict, embed, translate or caption: rows on stdout or in a file, everything else on stderr."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.base.errors import ConfigError
from vitrail.base.text import format_job_time
from vitrail.cli.output.messages import print_error, print_note, write_to_stdout
from vitrail.cli.output.streams import get_binary_buffer

if TYPE_CHECKING:
    from vitrail.predict.job import JobResult, RowSource


def check_job_options(out: Path | None, *, resume: bool, overwrite: bool) -> None:
    """--resume and --overwrite are about a file."""
    for name, is_set in (("resume", resume), ("overwrite", overwrite)):
        if is_set and out is None:
            raise ConfigError(f"--{name} needs -o OUT, the file with the results")


def run_job(
    rows: "RowSource",
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    write_text: Callable[[str], object] = write_to_stdout,
) -> "JobResult":
    """Write the rows, and print what was done if they are in a file."""
    from vitrail.predict.job import Job

    result = Job(
        rows=rows,
        out=out,
        resume=resume,
        overwrite=overwrite,
        stdin=get_binary_buffer(sys.stdin),
        write_text=write_text,
        on_note=print_note,
        on_error=print_error,
        progress=partial(job_progress_bar, out),
    ).run()
    if result.out is not None:
        done = format_job_time(result.total, result.resumed, rows.noun, result.seconds)
        print(f"{result.out}: {'complete' if result.was_complete else done}")
    return result


def job_progress_bar(out: Path | None, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """A bar or a line, unless rows are printed there; importing it takes a while, so not for a single item."""
    if total < 2 or (out is None and (sys.stdout.isatty() or not sys.stderr.isatty())):
        return nullcontext(lambda _: None)
    from vitrail.cli.output.progress import progress_bar

    return progress_bar(total, "predicting")
