"""Transforms of batches, on any device: normalisation, random erasing, Mixup and CutMix."""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.decoding.crops import CropBox
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.rng import ERASING_PURPOSE, uniform_randoms


def normalise(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (…, channels, rows, columns) to model input, bit-identical to `preprocess_image`; floats stay unchanged."""
    if pixels.is_floating_point():
        return pixels
    images = pixels.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    # divide by tensors: torch may replace the division by a number with a product with its rounded inverse
    full, mean, std = (images.new_tensor(n).reshape(-1, 1, 1) for n in (255, preprocessing.mean, preprocessing.std))
    return images.div_(full).sub_(mean).div_(std)


def random_erase(images: Tensor, keys: NDArray[np.uint64], rate: float) -> Tensor:
    """Random erasing (https://arxiv.org/abs/1708.04896): a rectangle of normal noise per image, drawn by its key."""
    rows, columns = images.shape[-2:]
    boxes = [
        random_erase_box(rows, columns, draws[1:]) if draws[0] < rate else None
        for draws in uniform_randoms(keys, 23, ERASING_PURPOSE).tolist()
    ]
    images = images.clone()
    for image, box, key in zip(images, boxes, keys.tolist(), strict=True):
        if box:
            # drawn on the CPU, so that every device gets the same noise
            noise = torch.randn(len(image), box.rows, box.columns, generator=torch.Generator().manual_seed(key))
            image[:, box.top : box.top + box.rows, box.left : box.left + box.columns] = noise.to(image)
    return images


def random_erase_box(rows: int, columns: int, draws: Sequence[float]) -> CropBox | None:
    """A box of 2% to a third of the image, aspect 0.3 to 1/0.3; None if none of ten fits into the image."""
    for share, slant in zip(draws[2::2], draws[3::2], strict=True):
        pixels = rows * columns * (0.02 + share * (1 / 3 - 0.02))
        ratio = 0.3 ** (1 - 2 * slant)
        height, width = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if height < rows and width < columns:
            return CropBox(int(draws[0] * (rows - height + 1)), int(draws[1] * (columns - width + 1)), height, width)
    return None


def mixup_or_cutmix(
    images: Tensor, labels: Tensor, classes: int, augmentation: Augmentation, key: int
) -> tuple[Tensor, Tensor]:
    """Mixup (https://arxiv.org/abs/1710.09412) or CutMix (https://arxiv.org/abs/1905.04899), and targets (B, classes).

    Neighbours are mixed, 0 with 1 and 2 with 3, so that ranks and micro-batches of even size give the same result; the
    last image of an odd batch is not mixed.
    """
    random = Random(key)
    cut = augmentation.cutmix > 0 and (augmentation.mixup == 0 or random.random() < 0.5)
    alpha = augmentation.cutmix if cut else augmentation.mixup
    targets = smooth_labels(labels, classes, augmentation.smoothing)
    if alpha == 0:
        return images, targets
    own_share = random.betavariate(alpha, alpha)
    partners = torch.arange(len(images), device=images.device) ^ 1
    partners = partners.clamp(max=len(images) - 1)
    if cut:
        box = random_cutmix_box(images.shape[-2], images.shape[-1], own_share, random)
        own_share = 1 - box.rows * box.columns / (images.shape[-2] * images.shape[-1])
        inside = (..., slice(box.top, box.top + box.rows), slice(box.left, box.left + box.columns))
        pasted = images[inside][partners]
        images = images.clone()
        images[inside] = pasted
    else:
        images = images.lerp(images[partners], 1 - own_share)
    return images, targets.lerp(targets[partners], 1 - own_share)


def smooth_labels(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One-hot targets with label smoothing: (B,) → (B, classes)."""
    targets = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], 1 - smoothing + smoothing / classes)


def random_cutmix_box(rows: int, columns: int, own_share: float, random: Random) -> CropBox:
    """A box of 1 − `own_share` of the area and the image's aspect, around a random pixel, clipped to the image."""
    side = math.sqrt(1 - own_share)
    height, width = int(rows * side), int(columns * side)
    y, x = random.randrange(rows), random.randrange(columns)
    top, bottom = max(y - height // 2, 0), min(y + (height + 1) // 2, rows)
    left, right = max(x - width // 2, 0), min(x + (width + 1) // 2, columns)
    return CropBox(top, left, bottom - top, right - left)
