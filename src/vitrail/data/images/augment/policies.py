"""Random changes of colours and geometry: RandAugment, AutoAugment, three-augment and colour jitter.

RandAugment (https://arxiv.org/abs/1909.13719) as timm's rand-m9-mstd0.5-inc1, AutoAugment
(https://arxiv.org/abs/1805.09501) with its ImageNet policy, three-augment of DeiT III (https://arxiv.org/abs/2204.07118).
"""

import math
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.preprocessing import PILLOW_FILTERS, Preprocessing

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


@dataclass(frozen=True)
class WarpOptions:
    """Fill colour and resampling filter of geometric operations."""

    fill: tuple[int, ...] | int
    resample: Image.Resampling


def apply_policy_and_jitter(
    image: Image.Image, augmentation: Augmentation, preprocessing: Preprocessing, random: Random
) -> Image.Image:
    """Apply the policy, then colour jitter."""
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
        amount = randomly_negate(name, rand_augment_amount(name, min(max(magnitude, 0), 10) / 10), random)
        if random.random() < 0.5:
            image = apply_operation(image, name, amount, warp)
    return image


def rand_augment_amount(name: str, level: float) -> float:
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
        amount = randomly_negate(name, auto_augment_amount(name, magnitude / 9), random)
        if random.random() < rate:
            image = apply_operation(image, name, amount, warp)
    return image


def auto_augment_amount(name: str, level: float) -> float:
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
    """Apply one operation. `amount` is a factor minus 1 for colours, a share of the side for translations.

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
    """Grey, solarize or blur, with equal probability."""
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
