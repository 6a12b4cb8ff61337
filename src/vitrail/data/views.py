"""Pictures as training sees them: every random choice is a function of the picture's key alone."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augmentation import Augmentation
from vitrail.data.draws import uniforms


def is_batched(augmentation: Augmentation) -> bool:
    """Whether `batch_views` does all that `view` would do to pictures of the right size."""
    return augmentation.crop != "resized" and augmentation.policy == "none" and augmentation.jitter == 0


def batch_views(pixels: Tensor, augmentation: Augmentation, keys: NDArray[np.uint64]) -> Tensor:
    """Shifts and flips of uint8 (B, channels, rows, columns) as evaluation shows them, one key each."""
    by = augmentation.shift if augmentation.crop == "shift" else 0
    if not by and not augmentation.flip:
        return pixels
    rows, columns = pixels.shape[-2:]
    draws = uniforms(keys, 3)
    flips = (draws[:, 0] < augmentation.flip).tolist()
    corners = (draws[:, 1:] * (2 * by + 1)).astype(np.int64).tolist()
    padded = np.pad(pixels.numpy(), ((0, 0), (0, 0), (by, by), (by, by)), "reflect")
    views = np.empty(pixels.shape, np.uint8)
    for view, picture, flip, (top, left) in zip(views, padded, flips, corners, strict=True):
        part = picture[:, top : top + rows, left : left + columns]
        view[...] = part[:, :, ::-1] if flip else part
    return torch.from_numpy(views)
