"""Crops chosen before decoding, so that a large JPEG is decoded at a reduced size if that suffices."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.images.decoding import jpeg
from vitrail.data.images.decoding.image_formats import (
    ImageLimits,
    check_file_size,
    check_jpeg_pixels_and_scans,
    open_undecoded,
    read_encoded_bytes_and_name,
    wrap_image_errors,
)
from vitrail.data.images.decoding.rgb_image import (
    EXIF_TRANSPOSES,
    SWAPPED_ORIENTATIONS,
    get_pillow_or_default_limits,
    open_image,
    read_exif_orientation,
    to_rgb,
    to_upright_8_bit,
)

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
    # none of ten boxes fits: use the largest one of an allowed aspect, centred
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
    if data is not None:
        return decode_crops_from_bytes(data, where, choose, limits)
    image = open_image(source)
    return [crop_to_array(image, each.box) for each in choose(image.height, image.width)]


def decode_crops_from_bytes(
    data: bytes, where: str, choose: Callable[[int, int], Sequence[SizedBox]], limits: ImageLimits
) -> list[NDArray[np.uint8]]:
    with wrap_image_errors(where):
        check_file_size(data, where, limits)
        crops = decode_crops_with_simplejpeg(data, where, choose, limits)
        if crops is not None:
            return crops
        image = open_undecoded(data, where, limits)
        swapped = read_exif_orientation(image) in SWAPPED_ORIENTATIONS
        rows, columns = (image.width, image.height) if swapped else (image.height, image.width)
        chosen = choose(rows, columns)
        boxes, divisor = [each.box for each in chosen], find_common_divisor(chosen)
        reduced_size = (image.width // divisor, image.height // divisor)
        if divisor > 1 and image.draft(image.mode, reduced_size):  # None unless it is a JPEG
            boxes = [scale_down_box(box, divisor, -(-rows // divisor), -(-columns // divisor)) for box in boxes]
        image = to_rgb(to_upright_8_bit(image, where))  # frees the previous image
        return [crop_to_array(image, box) for box in boxes]


def decode_crops_with_simplejpeg(
    data: bytes, where: str, choose: Callable[[int, int], Sequence[SizedBox]], limits: ImageLimits
) -> list[NDArray[np.uint8]] | None:
    """The crops by simplejpeg; None unless it is a valid upright JPEG, so that Pillow decodes the rest."""
    header = jpeg.read_jpeg_header(data)
    if header is None or header.orientation in EXIF_TRANSPOSES:
        return None
    check_jpeg_pixels_and_scans(data, header.rows, header.columns, where, limits, full_size=True)
    chosen = choose(header.rows, header.columns)
    divisor = find_common_divisor(chosen)
    pixels = jpeg.try_decode_jpeg(data, header, divisor)
    if pixels is None:
        return None
    boxes = [scale_down_box(each.box, divisor, pixels.shape[0], pixels.shape[1]) for each in chosen]
    return [pixels[top : top + height, left : left + width] for top, left, height, width in boxes]


def find_common_divisor(chosen: Sequence[SizedBox]) -> int:
    """The largest divisor of a JPEG's size that leaves every box enough pixels."""
    return min(jpeg.find_largest_jpeg_divisor((box.rows, box.columns), min_size) for box, min_size in chosen)


def scale_down_box(box: CropBox, divisor: int, rows: int, columns: int) -> CropBox:
    """The box in the same image decoded at a reduced size of (rows, columns), rounded to pixels and kept inside."""
    top, left, height, width = (round(each / divisor) for each in box)
    return CropBox(min(top, rows - height), min(left, columns - width), height, width)


def crop_to_array(image: Image.Image, box: CropBox) -> NDArray[np.uint8]:
    return np.array(image.crop((box.left, box.top, box.left + box.columns, box.top + box.rows)))
