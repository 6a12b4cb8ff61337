"""Random choices of patches, functions of the keys of a batch: other images and processes change nothing."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.rng import MASKING_PURPOSE, uniform_randoms


def draw_noise(keys: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of `count` patches or squares: (B,) → (B, count)."""
    return uniform_randoms(keys, count, MASKING_PURPOSE)


def split_by_noise(noise: NDArray[np.float64], kept: int) -> tuple[Tensor, Tensor]:
    """The indices of the `kept` smallest numbers of each row, and those of the others: (B, K), (B, n − K)."""
    order = torch.from_numpy(np.argsort(noise, axis=1, kind="stable"))
    return order[:, :kept], order[:, kept:]


def draw_mask(keys: NDArray[np.uint64], count: int, hidden: int) -> Tensor:
    """A mask that is True for exactly `hidden` of `count` patches or squares of each image: bool (B, count)."""
    chosen, _ = split_by_noise(draw_noise(keys, count), hidden)
    return torch.zeros(len(keys), count, dtype=torch.bool).scatter_(1, chosen, value=True)
