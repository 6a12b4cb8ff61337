"""Commands in processes of their own that have all imported already: to be killed, interrupted, starved.

They are forked from a process that has never computed anything: one forked from the tests' own, with the threads and
locks of whatever ran there before, may wait for ever.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from vitrail.cli import main

TIMEOUT_SECONDS = 120  # seconds, for what takes one or two
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch", "numpy", "PIL.Image", "vitrail.cli.predict", "vitrail.cli.embed", "vitrail.predict.torch_engine"]
)


def start_command(
    words: Sequence[object],
    *,
    stdin: Path | None = None,
    stdout: Path | None = None,
    stderr: Path | None = None,
    longest_file: int | None = None,
) -> BaseProcess:
    """`vitrail WORDS…`, begun; its streams are files, or nowhere."""
    process = PROCESSES.Process(
        target=run_command, args=(list(map(str, words)), (stdin, stdout, stderr), longest_file, dict(os.environ))
    )
    process.start()
    return process


def run_command(
    words: list[str], streams: tuple[Path | None, ...], longest_file: int | None, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    for number, place in enumerate(streams):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(os.open(place or os.devnull, flags, 0o666), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "w" if number else "r") for number in range(3))
    if longest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, longest_file))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    sys.argv = ["vitrail", *words]
    main()


def wait_until(process: BaseProcess, happened: Callable[[], bool]) -> None:
    """Until that has happened, or the process is over."""
    limit = time.monotonic() + TIMEOUT_SECONDS
    while process.is_alive() and not happened():
        assert time.monotonic() < limit, "it hangs"
        time.sleep(0.001)


def kill_process(process: BaseProcess, after: float = 0.0) -> bool:
    """As kill -9 does, so many seconds from now; whether that was in time."""
    process.join(after)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def wait_for_exit(process: BaseProcess) -> int | None:
    """Its exit code, once it is over."""
    process.join(TIMEOUT_SECONDS)
    assert not process.is_alive(), "it hangs"
    return process.exitcode


def drop_engine_notes(err: str | Path) -> str:
    """What was said, but for which engine was chosen and why."""
    text = err if isinstance(err, str) else err.read_text("utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("vitrail: note: engine "))
