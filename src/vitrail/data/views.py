"""Pictures as training sees them: every random choice is a function of the picture's key alone."""

from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.augmentation import Augmentation
from vitrail.data.crops import DRAWS, Box, part, resized_box
from vitrail.data.draws import uniforms
from vitrail.data.image_formats import prefix_errors
from vitrail.data.images import open_image
from vitrail.data.policies import recoloured
from vitrail.data.preprocessing import Preprocessing, frame, mode_of
from vitrail.models.checks import pair


def view(source: Any, augmentation: Augmentation, preprocessing: Preprocessing, key: int) -> Tensor:
    """One view of a picture, uint8 (channels, rows, columns): cropped, flipped, and its colours changed, in this order.

    `source` is whatever `open_image` takes.
    """
    keys = np.array([key], np.uint64)
    if augmentation.crop == "resized":
        pixels = resized(source, augmentation, preprocessing, keys)
    else:
        with prefix_errors(source):
            whole = as_tensor(frame(open_image(source), preprocessing))
        pixels = batch_views(whole[None], augmentation, keys)[0]
    if augmentation.policy == "none" and augmentation.jitter == 0:
        return pixels
    bands = [Image.fromarray(band) for band in pixels.numpy()]
    image = bands[0] if len(bands) == 1 else Image.merge("RGB", bands)
    return as_tensor(recoloured(image, augmentation, preprocessing, Random(key)))


def resized(source: Any, augmentation: Augmentation, preprocessing: Preprocessing, keys: NDArray[np.uint64]) -> Tensor:
    """A random part of the picture at the model's size, flipped or not."""
    flip, *draws = uniforms(keys, 1 + DRAWS)[0].tolist()
    size = pair(preprocessing.image_size)

    def choose(rows: int, columns: int) -> Box:
        return resized_box(rows, columns, augmentation.area, augmentation.aspect, draws)

    pixels = part(source, choose, size)
    if mode_of(preprocessing) == "L":
        pixels = np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    image = F.interpolate(image, size, mode=preprocessing.interpolation, antialias=True)[0]
    return (image.flip(-1) if flip < augmentation.flip else image).contiguous()


def as_tensor(image: Image.Image) -> Tensor:
    """uint8 (channels, rows, columns); band by band, for Pillow takes them apart faster than numpy."""
    return torch.from_numpy(np.stack([np.asarray(band) for band in image.split()]))


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
