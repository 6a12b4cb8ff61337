"""Features of images as rows of an array (N, D): a tensor in memory, or an array on disk that is read in parts."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FeatureRows = Tensor | NDArray[np.float32]
ROWS_AT_ONCE = 16384  # read from disk; 25 MB for rows of 384 numbers


def read_rows(rows: FeatureRows, start: int, stop: int) -> Tensor:
    """The rows from `start` to `stop` as a tensor of float32, copied if they are in a file."""
    part = rows[start:stop]
    return part.float() if isinstance(part, Tensor) else torch.from_numpy(np.array(part, np.float32))


def take_rows(rows: FeatureRows, indices: NDArray[np.int64]) -> Tensor:
    """The rows at these indices as a tensor of float32."""
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(indices)].float()
    return torch.from_numpy(np.array(rows[indices], np.float32))
