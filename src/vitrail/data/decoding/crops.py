"""A part of a picture, chosen before a pixel is decoded, so that a large JPEG is decoded no finer than needed."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.decoding import jpeg
from vitrail.data.decoding.image_formats import (
    ImageLimits,
    check_file_size,
    check_jpeg,
    open_undecoded,
    read_image_file,
    wrap_image_errors,
)
from vitrail.data.decoding.rgb_image import (
    EXIF_TRANSPOSES,
    get_pillow_limits,
    open_image,
    read_exif_orientation,
    to_rgb,
    to_upright_8_bit,
)

UNIFORMS_PER_BOX = 22  # that `resized_box` uses: where, and ten times how large and how wide


class CropBox(NamedTuple):
    top: int
    left: int
    rows: int
    columns: int


def random_resized_crop_box(
    rows: int, columns: int, area: Sequence[float], aspect: Sequence[float], draws: Sequence[float]
) -> CropBox:
    """A random part of a picture by its share of the area and by its aspect (columns to rows), as in torchvision."""
    slimmest, widest = aspect
    for share, slant in zip(draws[2:UNIFORMS_PER_BOX:2], draws[3:UNIFORMS_PER_BOX:2], strict=True):
        pixels = rows * columns * (area[0] + share * (area[1] - area[0]))
        ratio = slimmest * (widest / slimmest) ** slant
        height, width = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < height <= rows and 0 < width <= columns:
            return CropBox(int(draws[0] * (rows - height + 1)), int(draws[1] * (columns - width + 1)), height, width)
    # ten boxes did not fit: the largest of an allowed aspect, in the middle
    height = min(rows, max(1, round(columns / slimmest)))
    width = min(columns, max(1, round(rows * widest)))
    return CropBox((rows - height) // 2, (columns - width) // 2, height, width)


def decode_crop(source: Any, choose: Callable[[int, int], CropBox], min_size: tuple[int, int]) -> NDArray[np.uint8]:
    """The box of a picture that `choose` finds for its rows and columns, upright and in RGB: (rows, columns, 3).

    A JPEG may be decoded at half, a quarter or an eighth of its size while the box keeps `least` rows and columns.
    """
    limits = get_pillow_limits()
    if isinstance(source, str | Path):
        where = repr(str(source))
        return decode_crop_from_bytes(read_image_file(source, where, limits), where, choose, min_size, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_crop_from_bytes(bytes(source), "the given data", choose, min_size, limits)
    image = open_image(source)
    return crop_to_array(image, choose(image.height, image.width))


def decode_crop_from_bytes(
    data: bytes, where: str, choose: Callable[[int, int], CropBox], min_size: tuple[int, int], limits: ImageLimits
) -> NDArray[np.uint8]:
    with wrap_image_errors(where):
        check_file_size(data, where, limits)
        quick = decode_crop_with_simplejpeg(data, where, choose, min_size, limits)
        if quick is not None:
            return quick
        image = open_undecoded(data, where, limits)
        turned = read_exif_orientation(image) in (5, 6, 7, 8)
        rows, columns = (image.width, image.height) if turned else (image.height, image.width)
        box = choose(rows, columns)
        by = jpeg_divisor_for_box(box, min_size)
        if by > 1 and image.draft(image.mode, (image.width // by, image.height // by)):  # None if it is no JPEG
            box = scale_down_box(box, by, -(-rows // by), -(-columns // by))
        image = to_rgb(to_upright_8_bit(image, where))  # frees the previous image
        return crop_to_array(image, box)


def decode_crop_with_simplejpeg(
    data: bytes, where: str, choose: Callable[[int, int], CropBox], min_size: tuple[int, int], limits: ImageLimits
) -> NDArray[np.uint8] | None:
    """By simplejpeg, if it is an upright JPEG with nothing to complain of; the rest is left to Pillow."""
    header = jpeg.read_jpeg_header(data)
    if header is None or header.orientation in EXIF_TRANSPOSES:
        return None
    check_jpeg(data, header.rows, header.columns, where, limits, whole=True)
    box = choose(header.rows, header.columns)
    by = jpeg_divisor_for_box(box, min_size)
    pixels = jpeg.decode_jpeg(data, header, by)
    if pixels is None:
        return None
    top, left, height, width = scale_down_box(box, by, pixels.shape[0], pixels.shape[1])
    return pixels[top : top + height, left : left + width]


def jpeg_divisor_for_box(box: CropBox, min_size: tuple[int, int]) -> int:
    """By how much a JPEG may be decoded smaller, as its decoder can."""
    return next((by for by in (8, 4, 2) if box.rows >= by * min_size[0] and box.columns >= by * min_size[1]), 1)


def scale_down_box(box: CropBox, by: int, rows: int, columns: int) -> CropBox:
    """The box in a picture decoded at a smaller size, to the nearest pixel inside."""
    height, width = round(box.rows / by), round(box.columns / by)
    return CropBox(min(round(box.top / by), rows - height), min(round(box.left / by), columns - width), height, width)


def crop_to_array(image: Image.Image, box: CropBox) -> NDArray[np.uint8]:
    return np.array(image.crop((box.left, box.top, box.left + box.columns, box.top + box.rows)))
