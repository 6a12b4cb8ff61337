"""A part of a picture, chosen before a pixel is decoded, so that a large JPEG is decoded no finer than needed."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import jpeg
from vitrail.data.image_formats import Limits, check_bytes, check_jpeg, faults_of, open_undecoded, read_image_file
from vitrail.data.images import TURNS, open_image, orientation, pillow_limits, to_rgb, upright

DRAWS = 22  # that `resized_box` uses: where, and ten times how large and how wide


class Box(NamedTuple):
    top: int
    left: int
    rows: int
    columns: int


def resized_box(rows: int, columns: int, area: Sequence[float], aspect: Sequence[float], draws: Sequence[float]) -> Box:
    """A random part of a picture by its share of the area and by its aspect (columns to rows), as in torchvision."""
    slimmest, widest = aspect
    for share, slant in zip(draws[2:DRAWS:2], draws[3:DRAWS:2], strict=True):
        pixels = rows * columns * (area[0] + share * (area[1] - area[0]))
        ratio = slimmest * (widest / slimmest) ** slant
        height, width = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < height <= rows and 0 < width <= columns:
            return Box(int(draws[0] * (rows - height + 1)), int(draws[1] * (columns - width + 1)), height, width)
    # ten boxes did not fit: the largest of an allowed aspect, in the middle
    height = min(rows, max(1, round(columns / slimmest)))
    width = min(columns, max(1, round(rows * widest)))
    return Box((rows - height) // 2, (columns - width) // 2, height, width)


def part(source: Any, choose: Callable[[int, int], Box], least: tuple[int, int]) -> NDArray[np.uint8]:
    """The box of a picture that `choose` finds for its rows and columns, upright and in RGB: (rows, columns, 3).

    A JPEG may be decoded at half, a quarter or an eighth of its size while the box keeps `least` rows and columns.
    """
    limits = pillow_limits()
    if isinstance(source, str | Path):
        where = repr(str(source))
        return part_of_file(read_image_file(source, where, limits), where, choose, least, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return part_of_file(bytes(source), "the given data", choose, least, limits)
    image = open_image(source)
    return cut(image, choose(image.height, image.width))


def part_of_file(
    data: bytes, where: str, choose: Callable[[int, int], Box], least: tuple[int, int], limits: Limits
) -> NDArray[np.uint8]:
    with faults_of(where):
        check_bytes(data, where, limits)
        quick = quick_part(data, where, choose, least, limits)
        if quick is not None:
            return quick
        image = open_undecoded(data, where, limits)
        turned = orientation(image) in (5, 6, 7, 8)
        rows, columns = (image.width, image.height) if turned else (image.height, image.width)
        box = choose(rows, columns)
        by = shrinkage(box, least)
        if by > 1 and image.draft(image.mode, (image.width // by, image.height // by)):  # None if it is no JPEG
            box = shrunk(box, by, -(-rows // by), -(-columns // by))
        image = to_rgb(upright(image, where))  # frees the previous image
        return cut(image, box)


def quick_part(
    data: bytes, where: str, choose: Callable[[int, int], Box], least: tuple[int, int], limits: Limits
) -> NDArray[np.uint8] | None:
    """By simplejpeg, if it is an upright JPEG with nothing to complain of; the rest is left to Pillow."""
    header = jpeg.header_of(data)
    if header is None or header.turn in TURNS:
        return None
    check_jpeg(data, header.rows, header.columns, where, limits, whole=True)
    box = choose(header.rows, header.columns)
    by = shrinkage(box, least)
    pixels = jpeg.decoded(data, header, by)
    if pixels is None:
        return None
    top, left, height, width = shrunk(box, by, pixels.shape[0], pixels.shape[1])
    return pixels[top : top + height, left : left + width]


def shrinkage(box: Box, least: tuple[int, int]) -> int:
    """By how much a JPEG may be decoded smaller, as its decoder can."""
    return next((by for by in (8, 4, 2) if box.rows >= by * least[0] and box.columns >= by * least[1]), 1)


def shrunk(box: Box, by: int, rows: int, columns: int) -> Box:
    """The box in a picture decoded at a smaller size, to the nearest pixel inside."""
    height, width = round(box.rows / by), round(box.columns / by)
    return Box(min(round(box.top / by), rows - height), min(round(box.left / by), columns - width), height, width)


def cut(image: Image.Image, box: Box) -> NDArray[np.uint8]:
    return np.array(image.crop((box.left, box.top, box.left + box.columns, box.top + box.rows)))
