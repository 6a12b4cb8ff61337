"""From an image to model input: antialiased resize, center crop and normalization, numerically identical to timm."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitrail.base.errors import ConfigError, DataError, unknown_name_error
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair

MAX_RESIZED_PIXELS = 2**26  # of a resized image: 256 MB in Pillow
# both antialiased in Pillow
PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image becomes model input: resize, center crop, normalize.

    The short side is resized to floor(image_size / crop) pixels (224 / 0.9 → 248) with an antialiased filter, and the
    long side in proportion, rounded down. The center of `image_size` is cropped, and each channel becomes
    (pixel / 255 - mean) / std. This equals timm's evaluation transform. For an image size that is not square, see
    `compute_resize_size`. `vitrail.open_model(…).transform` applies it to a photo.

    >>> vitrail.Preprocessing(image_size=224, crop=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).crop
    0.9
    """

    image_size: Size = 224  # rows, columns
    crop: float = 0.9  # share of the resized image kept by the center crop; above 1 a black border is added
    fit: Literal["short_side", "squash"] = "short_side"  # keep the aspect ratio, or not
    middle: Literal["rounded", "floored"] = "rounded"  # odd margin: timm and torchvision round, transformers floors
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    # per channel, for pixels from 0 to 1
    mean: tuple[float, ...] = field(default=(0.5, 0.5, 0.5), metadata=MAY_BE_ZERO)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.mean) != len(self.std):
            raise ConfigError(f"{len(self.mean)} means and {len(self.std)} stds; expected one of each per channel")
        if self.crop > min(pair(self.image_size)):
            raise ConfigError(f"crop is {self.crop}; expected the share of the image to keep, for example 0.9")

    def with_fields(self, changes: Mapping[str, Any]) -> "Preprocessing":
        """A copy with these fields replaced."""
        for name in changes:
            if name not in vars(self):
                others = [each for each in vars(self) if each != "image_size"]  # which a model decides
                raise unknown_name_error("preprocessing field", name, others)
        return replace(self, **changes)


def preprocess_image(image: Image.Image, preprocessing: Preprocessing) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The model input for an RGB image: (channels, rows, columns), one channel if there is one mean."""
    image = resize_and_crop(image, preprocessing)
    return normalize_pixels(np.asarray(image).reshape(image.height, image.width, -1), preprocessing)


def normalize_pixels(
    pixels: np.ndarray[Any, np.dtype[np.uint8]], preprocessing: Preprocessing
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Pixels from 0 to 255, (rows, columns, C) → the model input (C, rows, columns)."""
    mean, std = np.array(preprocessing.mean, np.float32), np.array(preprocessing.std, np.float32)
    return np.ascontiguousarray(((pixels.astype(np.float32) / np.float32(255) - mean) / std).transpose(2, 0, 1))


def resize_and_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The image at the model's size, gray if there is one mean; not yet normalized."""
    mode = get_pillow_mode(preprocessing)
    image = image if image.mode == mode else image.convert(mode)
    rows, columns = compute_checked_resize_size((image.height, image.width), preprocessing)
    if image.size != (columns, rows):
        image = image.resize((columns, rows), PILLOW_FILTERS[preprocessing.interpolation])
    return center_crop(image, preprocessing)


def compute_visible_box(image_size: tuple[int, int], preprocessing: Preprocessing) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the part that reaches the model, in pixels of an image of (rows, columns)."""
    resized, size = compute_resize_size(image_size, preprocessing), pair(preprocessing.image_size)
    floored = preprocessing.middle == "floored"
    top, left = (compute_crop_offset(have, want, floored) for have, want in zip(resized, size, strict=True))
    y_scale, x_scale = image_size[0] / resized[0], image_size[1] / resized[1]  # image pixels per resized pixel
    return left * x_scale, top * y_scale, (left + size[1]) * x_scale, (top + size[0]) * y_scale


def get_pillow_mode(preprocessing: Preprocessing) -> str:
    """Pillow's mode of the model input: gray or RGB."""
    if len(preprocessing.mean) not in (1, 3):
        raise ConfigError(f"{len(preprocessing.mean)} means; expected 3, or 1 for gray images")
    return "L" if len(preprocessing.mean) == 1 else "RGB"


def compute_resize_size(image_size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """Rows and columns before the crop.

    With `short_side` the image just covers the size divided by `crop`: if that is square, by the short side (the long
    side is rounded down as in torchvision), otherwise by the larger of both scales (rounded as in timm).
    """
    rows, columns = (floor(side / preprocessing.crop) for side in pair(preprocessing.image_size))
    if preprocessing.fit == "squash":
        return rows, columns
    if rows == columns:
        short = min(image_size)
        return int(rows * image_size[0] / short), int(rows * image_size[1] / short)
    shrink = min(image_size[0] / rows, image_size[1] / columns)
    return round(image_size[0] / shrink), round(image_size[1] / shrink)


def compute_checked_resize_size(image_size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """As `compute_resize_size`; a size that would fill the memory is an error."""
    rows, columns = compute_resize_size(image_size, preprocessing)
    if rows * columns > MAX_RESIZED_PIXELS:
        given = f"an image of {image_size[0]}×{image_size[1]} pixels would be resized to {rows}×{columns}"
        raise DataError(f"{given}; expected at most {MAX_RESIZED_PIXELS} pixels: crop it first")
    return rows, columns


def center_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Crop the center of the resized image; a smaller image gets a black border."""
    size, floored = pair(preprocessing.image_size), preprocessing.middle == "floored"
    top, left = (
        compute_crop_offset(have, want, floored) for have, want in zip((image.height, image.width), size, strict=True)
    )
    return image.crop((left, top, left + size[1], top + size[0]))


def compute_crop_offset(have: int, want: int, floored: bool) -> int:
    if have < want:
        return -((want - have) // 2)
    return (have - want) // 2 if floored else round((have - want) / 2)
