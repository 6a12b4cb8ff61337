"""Errors of data workers: a killed one is reported in one line."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from vitrail.base.errors import DataError


def is_worker_death(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, means that a data worker was killed.

    torch raises it from a signal handler, so at any point of the main thread, not only where a batch is requested.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def wrap_dead_worker_errors(workers: int, describe_loss: Callable[[], str] = str) -> Generator[None]:
    """Turn torch's traceback for a killed data worker into a one-line error that ends in what was lost."""
    try:
        yield
    except Exception as error:
        if not is_worker_death(error):
            raise
        raise DataError(
            f"one of {workers} data workers was killed, perhaps because memory ran out; "
            f"use fewer `workers`, or more memory{describe_loss()}"
        ) from None
