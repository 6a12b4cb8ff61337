"""Standard streams that may be closed, replaced by an object without bytes, or whose reader may exit."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO


def open_devnull() -> TextIOWrapper:
    return Path(os.devnull).open("w")


def get_binary_buffer(stream: TextIO | None) -> BinaryIO | None:
    """The bytes below a text stream; None if it is closed, or an object that holds only text."""
    return stream.buffer if isinstance(stream, TextIOWrapper) else None


class PipeTolerantOutput(TextIOWrapper):
    """An output whose reader may exit, as in `vitrail train | tee log`, without ending hours of work."""

    def write(self, text: str, /) -> int:
        with self.ignore_broken_pipe():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self.ignore_broken_pipe():
            super().flush()

    @contextmanager
    def ignore_broken_pipe(self) -> Generator[None]:
        try:
            yield
        except BrokenPipeError:
            redirect_to_devnull(self)


def wrap_stdio_against_broken_pipe(stream: TextIO) -> TextIO:
    if not isinstance(stream, TextIOWrapper) or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    return PipeTolerantOutput(stream.buffer, stream.encoding, "replace", line_buffering=stream.line_buffering)


def redirect_to_devnull(stream: TextIO) -> None:
    """Drop what is still to be written: it would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
