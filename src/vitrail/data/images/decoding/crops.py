"""Crops chosen before decoding, so that a large JPEG is decoded at a reduced size if that suffices."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.images.decoding.image_formats import (
    EXIF_TRANSPOSES,
    ImageLimits,
    read_encoded_bytes_and_name,
    wrap_image_errors,
)
from vitrail.data.images.decoding.jpeg import JpegHeader, decode_jpeg, find_largest_jpeg_divisor, is_jpeg
from vitrail.data.images.decoding.rgb_image import get_pillow_or_default_limits, open_encoded_image, open_image

UNIFORMS_PER_BOX = 22  # numbers for `random_resized_crop_box`: position, then ten pairs of area and aspect


class CropBox(NamedTuple):
    top: int
    left: int
    rows: int
    columns: int


class SizedBox(NamedTuple):
    """A box, and the (rows, columns) that it keeps at least if the image is decoded at a reduced size."""

    box: CropBox
    min_size: tuple[int, int]


def random_resized_crop_box(
    rows: int, columns: int, area: Sequence[float], aspect: Sequence[float], draws: Sequence[float]
) -> CropBox:
    """A random box with a share of the area and an aspect (columns / rows) within limits, as in torchvision."""
    min_aspect, max_aspect = aspect
    for share, slant in zip(draws[2:UNIFORMS_PER_BOX:2], draws[3:UNIFORMS_PER_BOX:2], strict=True):
        pixels = rows * columns * (area[0] + share * (area[1] - area[0]))
        ratio = min_aspect * (max_aspect / min_aspect) ** slant
        height, width = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < height <= rows and 0 < width <= columns:
            return CropBox(int(draws[0] * (rows - height + 1)), int(draws[1] * (columns - width + 1)), height, width)
    # none of ten boxes fits: use the largest one of an allowed aspect, centered
    height = min(rows, max(1, round(columns / min_aspect)))
    width = min(columns, max(1, round(rows * max_aspect)))
    return CropBox((rows - height) // 2, (columns - width) // 2, height, width)


def decode_crop(source: Any, choose: Callable[[int, int], CropBox], min_size: tuple[int, int]) -> NDArray[np.uint8]:
    """The box that `choose` returns for (rows, columns) of an image, upright and in RGB: (rows, columns, 3).

    A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, as long as the box keeps at least `min_size`.
    """
    return decode_crops(source, lambda rows, columns: [SizedBox(choose(rows, columns), min_size)])[0]


def decode_crops(source: Any, choose: Callable[[int, int], Sequence[SizedBox]]) -> list[NDArray[np.uint8]]:
    """Several boxes of an image that is decoded once, as `decode_crop`; a JPEG is reduced as far as all boxes allow."""
    limits = get_pillow_or_default_limits()
    data, where = read_encoded_bytes_and_name(source, limits)
    if data is not None and is_jpeg(data):
        with wrap_image_errors(where):
            return decode_jpeg_crops(data, where, choose, limits)
    image = open_image(source) if data is None else open_encoded_image(data, where, limits)
    return [crop_to_array(image, each.box) for each in choose(image.height, image.width)]


def decode_jpeg_crops(
    data: bytes, where: str, choose: Callable[[int, int], Sequence[SizedBox]], limits: ImageLimits
) -> list[NDArray[np.uint8]]:
    chosen = list[SizedBox]()

    def choose_divisor(header: JpegHeader) -> int:
        chosen[:] = choose(*header.upright_size)
        return min(find_largest_jpeg_divisor((box.rows, box.columns), min_size) for box, min_size in chosen)

    pixels, header, divisor = decode_jpeg(data, where, limits, choose_divisor)
    rows, columns = (-(-length // divisor) for length in header.upright_size)
    boxes = [scale_down_box(each.box, divisor, rows, columns) for each in chosen]
    transpose = EXIF_TRANSPOSES.get(header.orientation)
    if transpose is None and not isinstance(pixels, Image.Image):
        return [pixels[top : top + height, left : left + width] for top, left, height, width in boxes]
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image = image if transpose is None else image.transpose(transpose)
    return [crop_to_array(image, box) for box in boxes]


def scale_down_box(box: CropBox, divisor: int, rows: int, columns: int) -> CropBox:
    """The box in the same image decoded at a reduced size of (rows, columns), rounded to pixels and kept inside."""
    top, left, height, width = (round(each / divisor) for each in box)
    return CropBox(min(top, rows - height), min(left, columns - width), height, width)


def crop_to_array(image: Image.Image, box: CropBox) -> NDArray[np.uint8]:
    return np.array(image.crop((box.left, box.top, box.left + box.columns, box.top + box.rows)))
