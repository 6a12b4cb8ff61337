"""Features of images as rows of an array (N, D): a tensor in memory, or an array on disk that is read in parts."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FeatureRows = Tensor | NDArray[np.float32]
MAX_ROWS_AT_ONCE, MAX_BYTES_AT_ONCE = 65536, 2**27  # read from disk
STD_OFFSET = 1e-5


def count_rows_at_once(width: int) -> int:
    """How many rows of `width` numbers are read at once: 65,536, or fewer of wide rows."""
    return max(min(MAX_ROWS_AT_ONCE, MAX_BYTES_AT_ONCE // (4 * width)), 1)


def read_rows(rows: FeatureRows, start: int, stop: int) -> Tensor:
    """The rows from `start` to `stop` as a tensor of float32, copied if they are in a file."""
    part = rows[start:stop]
    return part.float() if isinstance(part, Tensor) else torch.from_numpy(np.array(part, np.float32))


def take_rows(rows: FeatureRows, indices: NDArray[np.int64]) -> Tensor:
    """The rows at these indices as a tensor of float32."""
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(indices)].float()
    return torch.from_numpy(np.array(rows[indices], np.float32))


def iterate_rows(rows: FeatureRows, rows_at_once: int | None = None) -> Iterator[Tensor]:
    """All rows, in parts of a bounded size."""
    many = rows_at_once or count_rows_at_once(rows.shape[1])
    return (read_rows(rows, start, start + many) for start in range(0, len(rows), many))


def compute_mean_and_std(rows: FeatureRows) -> tuple[Tensor, Tensor]:
    """Mean and biased std of each column, plus a small number, in one pass each: (D,), (D,)."""
    total = sum(part.sum(0, dtype=torch.float64) for part in iterate_rows(rows))
    mean = (torch.as_tensor(total) / len(rows)).float()
    squares = sum((part - mean).square().sum(0, dtype=torch.float64) for part in iterate_rows(rows))
    return mean, (torch.as_tensor(squares) / len(rows)).sqrt().float() + STD_OFFSET
