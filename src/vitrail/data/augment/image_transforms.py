"""Pictures as training sees them: every random choice is a function of the picture's key alone."""

from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.augment.config import Augmentation
from vitrail.data.augment.policies import apply_policy_and_jitter
from vitrail.data.decoding.crops import UNIFORMS_PER_BOX, CropBox, decode_crop, random_resized_crop_box
from vitrail.data.decoding.image_formats import prefix_errors_with_path
from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.preprocessing import Preprocessing, get_pillow_mode, resize_and_crop
from vitrail.data.rng import uniform_randoms
from vitrail.models.checks import pair


def augment_image(source: Any, augmentation: Augmentation, preprocessing: Preprocessing, key: int) -> Tensor:
    """One view of a picture, uint8 (channels, rows, columns): cropped, flipped, and its colours changed, in this order.

    `source` is whatever `open_image` takes.
    """
    keys = np.array([key], np.uint64)
    if augmentation.crop == "resized":
        pixels = random_resized_crop(source, augmentation, preprocessing, keys)
    else:
        with prefix_errors_with_path(source):
            whole = image_to_tensor(resize_and_crop(open_image(source), preprocessing))
        pixels = shift_and_flip_batch(whole[None], augmentation, keys)[0]
    if augmentation.policy == "none" and augmentation.jitter == 0:
        return pixels
    bands = [Image.fromarray(band) for band in pixels.numpy()]
    image = bands[0] if len(bands) == 1 else Image.merge("RGB", bands)
    return image_to_tensor(apply_policy_and_jitter(image, augmentation, preprocessing, Random(key)))


def random_resized_crop(
    source: Any, augmentation: Augmentation, preprocessing: Preprocessing, keys: NDArray[np.uint64]
) -> Tensor:
    """A random part of the picture at the model's size, flipped or not."""
    flip, *draws = uniform_randoms(keys, 1 + UNIFORMS_PER_BOX)[0].tolist()
    size = pair(preprocessing.image_size)

    def choose(rows: int, columns: int) -> CropBox:
        return random_resized_crop_box(rows, columns, augmentation.area, augmentation.aspect, draws)

    pixels = decode_crop(source, choose, size)
    if get_pillow_mode(preprocessing) == "L":
        pixels = np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    image = F.interpolate(image, size, mode=preprocessing.interpolation, antialias=True)[0]
    return (image.flip(-1) if flip < augmentation.flip else image).contiguous()


def image_to_tensor(image: Image.Image) -> Tensor:
    """uint8 (channels, rows, columns); band by band, for Pillow takes them apart faster than numpy."""
    return torch.from_numpy(np.stack([np.asarray(band) for band in image.split()]))


def can_augment_as_batch(augmentation: Augmentation) -> bool:
    """Whether `batch_views` does all that `view` would do to pictures of the right size."""
    return augmentation.crop != "resized" and augmentation.policy == "none" and augmentation.jitter == 0


def shift_and_flip_batch(pixels: Tensor, augmentation: Augmentation, keys: NDArray[np.uint64]) -> Tensor:
    """Shifts and flips of uint8 (B, channels, rows, columns) as evaluation shows them, one key each."""
    by = augmentation.shift if augmentation.crop == "shift" else 0
    if not by and not augmentation.flip:
        return pixels
    rows, columns = pixels.shape[-2:]
    draws = uniform_randoms(keys, 3)
    flips = (draws[:, 0] < augmentation.flip).tolist()
    corners = (draws[:, 1:] * (2 * by + 1)).astype(np.int64).tolist()
    padded = np.pad(pixels.numpy(), ((0, 0), (0, 0), (by, by), (by, by)), "reflect")
    views = np.empty(pixels.shape, np.uint8)
    for view, picture, flip, (top, left) in zip(views, padded, flips, corners, strict=True):
        part = picture[:, top : top + rows, left : left + columns]
        view[...] = part[:, :, ::-1] if flip else part
    return torch.from_numpy(views)
