"""Random views of training images. Every random choice is a function of the view's key."""

from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.policies import apply_policy_and_jitter
from vitrail.data.images.decoding.crops import UNIFORMS_PER_BOX, CropBox, decode_crop, random_resized_crop_box
from vitrail.data.images.decoding.image_formats import prefix_errors_with_path
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, get_pillow_mode, resize_and_crop
from vitrail.data.rng import uniform_randoms
from vitrail.models.base.checks import pair


def augment_image(source: Any, augmentation: Augmentation, preprocessing: Preprocessing, key: int) -> Tensor:
    """Crop, flip, then change the colours of an image: uint8 (channels, rows, columns).

    `source` is any input of `open_image`.
    """
    keys = np.array([key], np.uint64)
    if augmentation.crop == "resized":
        pixels = random_resized_crop_and_flip(source, augmentation, preprocessing, keys)
    else:
        with prefix_errors_with_path(source):
            pixels = image_to_tensor(resize_and_crop(open_image(source), preprocessing))
        pixels = shift_and_flip_batch(pixels[None], augmentation, keys)[0]
    if augmentation.policy == "none" and augmentation.jitter == 0:
        return pixels
    bands = [Image.fromarray(band) for band in pixels.numpy()]
    image = bands[0] if len(bands) == 1 else Image.merge("RGB", bands)
    return image_to_tensor(apply_policy_and_jitter(image, augmentation, preprocessing, Random(key)))


def random_resized_crop_and_flip(
    source: Any, augmentation: Augmentation, preprocessing: Preprocessing, keys: NDArray[np.uint64]
) -> Tensor:
    """A random part of the image at the model's size, randomly flipped."""
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
    """uint8 (channels, rows, columns); Pillow splits the bands faster than numpy transposes."""
    return torch.from_numpy(np.stack([np.asarray(band) for band in image.split()]))


def can_augment_as_batch(augmentation: Augmentation) -> bool:
    """Whether `shift_and_flip_batch` equals `augment_image` for images of the model's size."""
    return augmentation.crop != "resized" and augmentation.policy == "none" and augmentation.jitter == 0


def shift_and_flip_batch(pixels: Tensor, augmentation: Augmentation, keys: NDArray[np.uint64]) -> Tensor:
    """Shift and flip preprocessed images, uint8 (B, channels, rows, columns), with one key per image."""
    shift = augmentation.shift if augmentation.crop == "shift" else 0
    if not shift and not augmentation.flip:
        return pixels
    rows, columns = pixels.shape[-2:]
    draws = uniform_randoms(keys, 3)
    flips = (draws[:, 0] < augmentation.flip).tolist()
    corners = (draws[:, 1:] * (2 * shift + 1)).astype(np.int64).tolist()
    padded = np.pad(pixels.numpy(), ((0, 0), (0, 0), (shift, shift), (shift, shift)), "reflect")
    views = np.empty(pixels.shape, np.uint8)
    for view, image, flip, (top, left) in zip(views, padded, flips, corners, strict=True):
        part = image[:, top : top + rows, left : left + columns]
        view[...] = part[:, :, ::-1] if flip else part
    return torch.from_numpy(views)
