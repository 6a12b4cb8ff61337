"""Views of many images: crops are resized and flipped one by one, colours are changed for the batch.

N images, C channels, h and w rows and columns of a view.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.images.augment.colours import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    compute_blur_radius,
    gaussian_blur,
    solarize,
    to_grey,
)
from vitrail.data.images.augment.view_config import ViewAugmentation
from vitrail.data.images.preprocessing import Preprocessing, get_pillow_mode
from vitrail.data.rng import COLOUR_PURPOSE, uniform_randoms
from vitrail.models.base.checks import pair

CHUNK_VALUES = 2**17  # changed at once: intermediate results stay in the cache of the processor
NO_OPERATION = -1
JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def resize_crop(crop: NDArray[np.uint8], preprocessing: Preprocessing, *, flip: bool) -> Tensor:
    """A crop (rows, columns, 1 or 3) at the size of the view: uint8 (1 or 3, h, w), grey if there is one mean."""
    if get_pillow_mode(preprocessing) == "L" and crop.shape[2] == 3:
        crop = np.asarray(Image.fromarray(crop).convert("L"))[:, :, None]
    # a copy: torch warns about arrays that cannot be written, and resizes contiguous ones faster
    pixels = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]
    size, mode = pair(preprocessing.image_size), preprocessing.interpolation
    pixels = F.interpolate(pixels, size, mode=mode, antialias=True)[0]
    return pixels.flip(-1) if flip else pixels


def recolour(pixels: Tensor, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
    """Change the colours of crops, uint8 (N, C, h, w), in place, with one key each."""
    draws = ColourDraws(augmentation, keys)
    chosen = np.flatnonzero(draws.jitter | draws.grey | draws.blur)
    for rows in np.array_split(chosen, max(1, chosen.size * pixels[:1].numel() // CHUNK_VALUES)):
        # numpy copies rows of bytes at once, torch one by one
        images = torch.from_numpy(pixels.numpy()[rows]).float()
        images = jitter_grey_and_blur(images, augmentation, draws, rows)
        pixels.numpy()[rows] = images.round_().to(torch.int16).to(torch.uint8).numpy()  # faster than without int16
    rows = np.flatnonzero(draws.solarize)
    pixels.numpy()[rows] = solarize(torch.from_numpy(pixels.numpy()[rows]), augmentation.solarize_threshold).numpy()


class ColourDraws:
    """The random choices of N images, by their keys."""

    def __init__(self, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
        jitter, grey, blur, sigma, inverted, *rest = uniform_randoms(keys, 13, COLOUR_PURPOSE).T
        factors, order = np.stack(rest[:4], 1), np.stack(rest[4:], 1)
        strengths = np.array(augmentation.jitter_strengths)
        lowest = np.append(np.maximum(1 - strengths[:3], 0), -augmentation.hue)
        highest = np.append(1 + strengths[:3], augmentation.hue)
        self.jitter = (jitter < augmentation.jitter_rate) & bool(strengths.any())
        self.amounts = torch.from_numpy((lowest + factors * (highest - lowest)).astype(np.float32))  # (N, 4)
        order = np.argsort(order, axis=1, kind="stable")
        self.order = np.where(self.jitter[:, None] & (strengths > 0)[order], order, NO_OPERATION)  # (N, 4)
        self.grey = grey < augmentation.grey_rate
        self.blur = blur < augmentation.blur_rate
        low, high = augmentation.blur_sigma
        self.sigmas = low + sigma * (high - low)
        self.solarize = inverted < augmentation.solarize_rate


def jitter_grey_and_blur(
    images: Tensor, augmentation: ViewAugmentation, draws: ColourDraws, chosen: NDArray[np.int64]
) -> Tensor:
    """Change the chosen images, float (N, C, h, w); values are rounded once, afterwards."""
    for numbers in draws.order[chosen].T:
        for number in sorted(set(numbers.tolist()) - {NO_OPERATION}):
            rows = np.flatnonzero(numbers == number)
            adjust = partial(JITTER_OPERATIONS[number], amounts=draws.amounts[chosen[rows], number])
            images = change_rows(images, rows, adjust)
    images = change_rows(images, np.flatnonzero(draws.grey[chosen]), to_grey)
    radius, rows = compute_blur_radius(images, augmentation.blur_kernel), np.flatnonzero(draws.blur[chosen])
    if radius == 0:
        return images
    return change_rows(images, rows, partial(gaussian_blur, sigmas=draws.sigmas[chosen[rows]], radius=radius))


def change_rows(images: Tensor, rows: NDArray[np.int64], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to these rows; in place, except if all rows change."""
    if len(rows) == 0:
        return images
    if len(rows) == len(images):
        return change(images)
    indices = torch.from_numpy(rows)
    return images.index_copy_(0, indices, change(images.index_select(0, indices)))
