"""A batch of named tensors with the random keys that they were drawn from; errors of the workers that make batches."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Examples of one step. They are the first axis of a tensor, or the second axis of a view with several crops."""

    tensors: Mapping[str, Tensor]
    keys: Mapping[str, NDArray[np.uint64]]  # by the name of a random tensor: one key per example, or per crop
    size: int  # examples
    skipped: tuple[str, ...] = ()  # one line per unreadable example: why

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def to(self, device: torch.device) -> "Batch":
        return replace(self, tensors={name: each.to(device, non_blocking=True) for name, each in self.tensors.items()})

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader; pinned memory is copied to a GPU faster."""
        return replace(self, tensors={name: each.pin_memory() for name, each in self.tensors.items()})


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
