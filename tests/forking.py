"""Commands in processes of their own that have all imported already: to be killed, interrupted, starved."""

import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from vitrail.cli import main


def forked(
    words: Sequence[object],
    *,
    stdin: Path | None = None,
    stdout: Path | int | None = None,
    stderr: Path | None = None,
    longest_file: int | None = None,
    closed: Sequence[int] = (),
) -> BaseProcess:
    """`vitrail WORDS…`, begun; its streams are files, a handle, or nowhere; handles of ours are `closed` in it."""
    process = multiprocessing.get_context("fork").Process(
        target=sitting, args=(list(map(str, words)), (stdin, stdout, stderr), longest_file, closed)
    )
    process.start()
    return process


def sitting(
    words: list[str], streams: tuple[Path | int | None, ...], longest_file: int | None, closed: Sequence[int]
) -> None:
    for handle in closed:
        os.close(handle)
    for number, place in enumerate(streams):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(place if isinstance(place, int) else os.open(place or os.devnull, flags, 0o666), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "w" if number else "r") for number in range(3))
    if longest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, longest_file))
    sys.argv = ["vitrail", *words]
    main()


def told(err: str | Path) -> str:
    """What was said, but for which engine was chosen and why."""
    text = err if isinstance(err, str) else err.read_text("utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("vitrail: note: engine "))
