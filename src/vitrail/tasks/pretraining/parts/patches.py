"""Patches as rows of pixels, and random masks: the targets and inputs of tasks that predict hidden patches.

B batch, C channels, P×Q patch, n = h·w patches row by row. A row has the order of MAE's code: row, column, channel.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.rng import MASKING_PURPOSE, uniform_randoms
from vitrail.layers.positions import Grid

VARIANCE_EPSILON = 1e-6


def split_into_patches(images: Tensor, patch: Grid) -> Tensor:
    """(B, C, H, W) → (B, n, P·Q·C)."""
    b, c, h, w = images.shape
    p, q = patch
    return images.reshape(b, c, h // p, p, w // q, q).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def join_patches(pixels: Tensor, patch: Grid, grid: Grid) -> Tensor:
    """The inverse of `split_into_patches`: (B, n, P·Q·C) → (B, C, H, W)."""
    (rows, columns), (p, q) = grid, patch
    patches = pixels.unflatten(2, (p, q, -1)).unflatten(1, (rows, columns))  # (B, h, w, P, Q, C)
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def compute_patch_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of each patch, with the unbiased variance, as in MAE: (…, 1)."""
    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return mean, (variance + VARIANCE_EPSILON).sqrt()


def normalize_patches(pixels: Tensor) -> Tensor:
    """Each patch with mean 0 and variance 1, which MAE calls norm_pix: (…, P·Q·C)."""
    mean, std = compute_patch_statistics(pixels)
    return (pixels - mean) / std


def take_patches(patches: Tensor, indices: Tensor) -> Tensor:
    """The patches at the indices of each image: (B, n, D), (B, K) → (B, K, D)."""
    return patches.gather(1, indices[..., None].expand(-1, -1, patches.shape[-1]))


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
