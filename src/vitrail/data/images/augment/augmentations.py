"""Random changes of training images: crops and flips, policies, then random erasing, Mixup and CutMix of batches.

Every random choice is a function of the key of the image's view. RandAugment (https://arxiv.org/abs/1909.13719) as
timm's rand-m9-mstd0.5-inc1, AutoAugment (https://arxiv.org/abs/1805.09501) with its ImageNet policy, three-augment of
DeiT III (https://arxiv.org/abs/2204.07118).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.decoding.crops import UNIFORMS_PER_BOX, CropBox, decode_crop, random_resized_crop_box
from vitrail.data.images.decoding.image_formats import prefix_errors_with_path
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import PILLOW_FILTERS, Preprocessing, get_pillow_mode, resize_and_crop
from vitrail.data.rng import ERASING_PURPOSE, uniform_randoms
from vitrail.models.base.checks import pair

SIGNED_OPERATIONS = {  # operations with a random sign → amount at full strength
    "rotate": 30,
    "color": 0.9,
    "contrast": 0.9,
    "brightness": 0.9,
    "sharpness": 0.9,
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 0.45,
    "translate_y": 0.45,
}
RAND_AUGMENT_OPERATIONS = (
    "autocontrast",
    "equalize",
    "invert",
    "posterize",
    "solarize",
    "solarize_add",
    *SIGNED_OPERATIONS,
)
PolicyStep = tuple[str, float, int]  # operation, probability, magnitude from 0 to 9
IMAGENET_POLICY: tuple[tuple[PolicyStep, PolicyStep], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 0)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
    (("equalize", 0.0, 0), ("equalize", 0.8, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 0)),
    (("color", 0.4, 0), ("equalize", 0.6, 0)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
)


def augment_image(source: Any, augmentation: Augmentation, preprocessing: Preprocessing, key: int) -> Tensor:
    """Crop, flip, then change the colors of an image: uint8 (channels, rows, columns).

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


@dataclass(frozen=True)
class WarpOptions:
    """Fill color and resampling filter of geometric operations."""

    fill: tuple[int, ...] | int
    resample: Image.Resampling


def apply_policy_and_jitter(
    image: Image.Image, augmentation: Augmentation, preprocessing: Preprocessing, random: Random
) -> Image.Image:
    """Apply the policy, then color jitter."""
    means = tuple(min(255, round(255 * mean)) for mean in preprocessing.mean)
    warp = WarpOptions(means[0] if image.mode == "L" else means, PILLOW_FILTERS[preprocessing.interpolation])
    if augmentation.policy == "rand":
        image = rand_augment(image, augmentation, warp, random)
    elif augmentation.policy == "auto":
        image = auto_augment(image, warp, random)
    elif augmentation.policy == "three":
        image = three_augment(image, random)
    return color_jitter(image, augmentation.jitter, random) if augmentation.jitter else image


def rand_augment(image: Image.Image, augmentation: Augmentation, warp: WarpOptions, random: Random) -> Image.Image:
    """Random operations, each applied with probability ½, with a magnitude near the given one."""
    for _ in range(augmentation.operations):
        name = random.choice(RAND_AUGMENT_OPERATIONS)
        magnitude = random.gauss(augmentation.magnitude, augmentation.magnitude_std)
        amount = randomly_negate(name, rand_augment_argument(name, min(max(magnitude, 0), 10) / 10), random)
        if random.random() < 0.5:
            image = apply_operation(image, name, amount, warp)
    return image


def rand_augment_argument(name: str, level: float) -> float:
    """The argument of an operation at a level from 0 (weakest) to 1."""
    match name:
        case "posterize":
            return 4 - int(level * 4)
        case "solarize":
            return 256 - int(level * 256)
        case "solarize_add":
            return int(level * 110)
        case _:
            return level * SIGNED_OPERATIONS.get(name, 0)


def auto_augment(image: Image.Image, warp: WarpOptions, random: Random) -> Image.Image:
    """A random pair of operations of the ImageNet policy."""
    for name, rate, magnitude in random.choice(IMAGENET_POLICY):
        amount = randomly_negate(name, auto_augment_argument(name, magnitude / 9), random)
        if random.random() < rate:
            image = apply_operation(image, name, amount, warp)
    return image


def auto_augment_argument(name: str, level: float) -> float:
    match name:
        case "posterize":
            return 8 - round(level * 4)
        case "solarize":
            return 255 - level * 255
        case _:
            return level * SIGNED_OPERATIONS.get(name, 0)


def randomly_negate(name: str, amount: float, random: Random) -> float:
    return -amount if name in SIGNED_OPERATIONS and random.random() < 0.5 else amount


def apply_operation(image: Image.Image, name: str, amount: float, warp: WarpOptions) -> Image.Image:
    """Apply one operation. `amount` is a factor minus 1 for colors, a share of the side for translations.

    Posterizing keeps `amount` bits per value; 0 bits give a black image.
    """
    match name:
        case "autocontrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "invert":
            return ImageOps.invert(image)
        case "posterize":
            mask = 256 - 2 ** (8 - int(amount))  # ImageOps.posterize refuses 0 bits
            return image.point([value & mask for value in range(256)] * len(image.getbands()))
        case "solarize":  # values are integers: below 28.3 means below 29
            return ImageOps.solarize(image, math.ceil(amount))
        case "solarize_add":
            brighter = [min(255, value + int(amount)) if value < 128 else value for value in range(256)]
            return image.point(brighter * len(image.getbands()))
        case "color":
            return ImageEnhance.Color(image).enhance(1 + amount)
        case "contrast":
            return ImageEnhance.Contrast(image).enhance(1 + amount)
        case "brightness":
            return ImageEnhance.Brightness(image).enhance(1 + amount)
        case "sharpness":
            return ImageEnhance.Sharpness(image).enhance(1 + amount)
        case "rotate":
            return image.rotate(amount, resample=warp.resample, fillcolor=warp.fill)
        case "shear_x":
            return affine_transform(image, (1, amount, 0, 0, 1, 0), warp)
        case "shear_y":
            return affine_transform(image, (1, 0, 0, amount, 1, 0), warp)
        case "translate_x":
            return affine_transform(image, (1, 0, amount * image.width, 0, 1, 0), warp)
        case "translate_y":
            return affine_transform(image, (1, 0, 0, 0, 1, amount * image.height), warp)
        case _:
            raise ValueError(name)


def affine_transform(image: Image.Image, matrix: tuple[float, ...], warp: WarpOptions) -> Image.Image:
    """The pixel (x, y) of the result is taken from (a·x + b·y + c, d·x + e·y + f) of the image."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=warp.resample, fillcolor=warp.fill)


def three_augment(image: Image.Image, random: Random) -> Image.Image:
    """Gray, solarize or blur, with equal probability."""
    chosen = random.randrange(3)
    if chosen == 0:
        return image.convert("L").convert(image.mode)
    if chosen == 1:
        return ImageOps.solarize(image, 128)
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2)))


def color_jitter(image: Image.Image, strength: float, random: Random) -> Image.Image:
    """Change brightness, contrast and saturation in random order by factors within 1 ± `strength`."""
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for enhancer in random.sample(enhancers, 3):
        image = enhancer(image).enhance(random.uniform(max(0, 1 - strength), 1 + strength))
    return image


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
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

    Neighbors are mixed, 0 with 1 and 2 with 3, so that ranks and micro-batches of even size give the same result; the
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
