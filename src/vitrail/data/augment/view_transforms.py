"""Views of many images at once: crops are resized one by one, flips and colours are computed for the batch.

N images, C channels, h and w rows and columns of a view.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.augment.colours import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    compute_blur_radius,
    gaussian_blur,
    solarize,
    to_grey,
)
from vitrail.data.augment.view_config import ViewAugmentation
from vitrail.data.preprocessing import Preprocessing, get_pillow_mode
from vitrail.data.rng import COLOUR_PURPOSE, uniform_randoms
from vitrail.models.checks import pair

CHUNK_VALUES = 2**19  # changed at once: intermediate results stay in the cache of the processor
JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def resize_crop(crop: NDArray[np.uint8], preprocessing: Preprocessing) -> Tensor:
    """A crop (rows, columns, 1 or 3) at the size of the view: uint8 (1 or 3, h, w), grey if there is one mean."""
    if get_pillow_mode(preprocessing) == "L" and crop.shape[2] == 3:
        crop = np.asarray(Image.fromarray(crop).convert("L"))[:, :, None]
    # a copy: torch warns about arrays that cannot be written, and resizes contiguous ones faster
    pixels = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]
    return F.interpolate(pixels, pair(preprocessing.image_size), mode=preprocessing.interpolation, antialias=True)[0]


def flip_and_recolour(pixels: Tensor, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
    """Change resized crops, uint8 (N, C, h, w), in place, with one key each."""
    flips = find_rows(uniform_randoms(keys, 1)[:, 0] < augmentation.flip)
    pixels[flips] = pixels[flips].flip(-1)
    draws = ColourDraws(augmentation, keys)
    changed = np.flatnonzero(draws.jitter | draws.grey | draws.blur)
    for rows in np.array_split(changed, -(-changed.size * pixels[:1].numel() // CHUNK_VALUES) or 1):
        if rows.size:
            pixels[torch.from_numpy(rows)] = recolour(pixels[torch.from_numpy(rows)], augmentation, draws, rows)
    inverted = find_rows(draws.solarize)
    pixels[inverted] = solarize(pixels[inverted], augmentation.solarize_threshold)


def find_rows(chosen: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen))


class ColourDraws:
    """The random choices of N images, by their keys."""

    def __init__(self, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
        jitter, grey, blur, sigma, inverted, *rest = uniform_randoms(keys, 13, COLOUR_PURPOSE).T
        factors, order = np.stack(rest[:4], 1), np.stack(rest[4:], 1)
        strengths = np.array(augmentation.jitter_strengths)
        lowest = np.append(np.maximum(1 - strengths[:3], 0), -augmentation.hue)
        highest = np.append(1 + strengths[:3], augmentation.hue)
        self.jitter = (jitter < augmentation.jitter_rate) & bool(strengths.any())
        self.factors = torch.from_numpy((lowest + factors * (highest - lowest)).astype(np.float32))  # (N, 4)
        self.order = np.argsort(order, axis=1, kind="stable")  # the operation at each position: (N, 4)
        self.grey = grey < augmentation.grey_rate
        self.blur = blur < augmentation.blur_rate
        low, high = augmentation.blur_sigma
        self.sigmas = low + sigma * (high - low)
        self.solarize = inverted < augmentation.solarize_rate


def recolour(pixels: Tensor, augmentation: ViewAugmentation, draws: ColourDraws, chosen: NDArray[np.int64]) -> Tensor:
    """Jitter, grey and blur of the chosen images, uint8 (N, C, h, w); the values are rounded once, at the end."""
    images = pixels.float()
    for position in range(len(JITTER_OPERATIONS)):
        for number, adjust in enumerate(JITTER_OPERATIONS):
            rows = find_rows(draws.jitter[chosen] & (draws.order[chosen, position] == number))
            if augmentation.jitter_strengths[number] and len(rows):
                images[rows] = adjust(images[rows], draws.factors[chosen[rows.numpy()], number])
    rows = find_rows(draws.grey[chosen])
    images[rows] = to_grey(images[rows]).expand(-1, images.shape[1], -1, -1)
    rows = find_rows(draws.blur[chosen])
    radius = compute_blur_radius((images.shape[2], images.shape[3]), augmentation.blur_kernel)
    if len(rows) and radius:
        images[rows] = gaussian_blur(images[rows], draws.sigmas[chosen[rows.numpy()]], radius)
    return images.round_().clamp_(0, 255).to(torch.uint8)
