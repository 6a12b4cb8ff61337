"""Views of many images at once: crops are resized one by one, flips and colours are computed for the batch."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.augment.view_config import ViewAugmentation
from vitrail.data.preprocessing import Preprocessing, get_pillow_mode
from vitrail.data.rng import uniform_randoms
from vitrail.models.checks import pair


def resize_crop(crop: NDArray[np.uint8], preprocessing: Preprocessing) -> Tensor:
    """A crop (rows, columns, 1 or 3) at the size of the view: uint8 (1 or 3, h, w), grey if there is one mean."""
    if get_pillow_mode(preprocessing) == "L" and crop.shape[2] == 3:
        crop = np.asarray(Image.fromarray(crop).convert("L"))[:, :, None]
    # a copy: torch warns about arrays that cannot be written, and resizes contiguous ones faster
    pixels = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]
    return F.interpolate(pixels, pair(preprocessing.image_size), mode=preprocessing.interpolation, antialias=True)[0]


def flip_and_recolour(pixels: Tensor, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> None:
    """Change resized crops, uint8 (N, C, h, w), in place, with one key each."""
    flips = torch.from_numpy(np.flatnonzero(uniform_randoms(keys, 1)[:, 0] < augmentation.flip))
    pixels[flips] = pixels[flips].flip(-1)
