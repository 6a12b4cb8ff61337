"""What happens to whole batches, on whatever device they are: normalising, erasing, Mixup and CutMix."""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment.config import Augmentation
from vitrail.data.decoding.crops import CropBox
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import ERASING_PURPOSE, uniform_randoms


def normalise(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (…, channels, rows, columns) as the floats a model sees, the bits of `prepare`; floats are so already."""
    if pixels.is_floating_point():
        return pixels
    images = pixels.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    # tensors, for by a plain number torch may multiply with its rounded inverse
    full, mean, std = (images.new_tensor(n).reshape(-1, 1, 1) for n in (255, preprocessing.mean, preprocessing.std))
    return images.div_(full).sub_(mean).div_(std)


def random_erase(images: Tensor, keys: NDArray[np.uint64], rate: float) -> Tensor:
    """Random erasing (https://arxiv.org/abs/1708.04896): one rectangle of normal noise, each picture by its own key."""
    rows, columns = images.shape[-2:]
    boxes = [
        random_erase_box(rows, columns, draws[1:]) if draws[0] < rate else None
        for draws in uniform_randoms(keys, 23, ERASING_PURPOSE).tolist()
    ]
    images = images.clone()
    for image, box, key in zip(images, boxes, keys.tolist(), strict=True):
        if box:
            # drawn on the CPU: the same on every device
            noise = torch.randn(len(image), box.rows, box.columns, generator=torch.Generator().manual_seed(key))
            image[:, box.top : box.top + box.rows, box.left : box.left + box.columns] = noise.to(image)
    return images


def random_erase_box(rows: int, columns: int, draws: Sequence[float]) -> CropBox | None:
    """From 2 % to a third of the picture, its aspect from 0.3 to 1/0.3; none if ten of them do not fit inside."""
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

    Neighbours mix, 0 with 1 and 2 with 3, so that any even split of the batch mixes alike; an odd last stays itself.
    """
    random = Random(key)
    cut = augmentation.cutmix > 0 and (augmentation.mixup == 0 or random.random() < 0.5)
    alpha = augmentation.cutmix if cut else augmentation.mixup
    targets = smooth_labels(labels, classes, augmentation.smoothing)
    if alpha == 0:
        return images, targets
    kept = random.betavariate(alpha, alpha)
    partners = torch.arange(len(images), device=images.device) ^ 1
    partners = partners.clamp(max=len(images) - 1)
    if cut:
        box = random_cutmix_box(images.shape[-2], images.shape[-1], kept, random)
        kept = 1 - box.rows * box.columns / (images.shape[-2] * images.shape[-1])
        inside = (..., slice(box.top, box.top + box.rows), slice(box.left, box.left + box.columns))
        pasted = images[inside][partners]
        images = images.clone()
        images[inside] = pasted
    else:
        images = images.lerp(images[partners], 1 - kept)
    return images, targets.lerp(targets[partners], 1 - kept)


def smooth_labels(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One-hot targets, a share of them spread over all classes."""
    targets = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], 1 - smoothing + smoothing / classes)


def random_cutmix_box(rows: int, columns: int, kept: float, random: Random) -> CropBox:
    """As large as what is not kept, of the picture's aspect, around any pixel; what lies outside is lost."""
    side = math.sqrt(1 - kept)
    height, width = int(rows * side), int(columns * side)
    middle, centre = random.randrange(rows), random.randrange(columns)
    top, bottom = max(middle - height // 2, 0), min(middle + (height + 1) // 2, rows)
    left, right = max(centre - width // 2, 0), min(centre + (width + 1) // 2, columns)
    return CropBox(top, left, bottom - top, right - left)
