"""From a file, or whatever else a picture comes as, to the pixels that a model sees of it, within limits."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import jpeg
from vitrail.data.image_formats import (
    DEFAULT,
    MOST_JPEG,
    MOST_WHOLE_JPEG,
    Limits,
    check_bytes,
    check_jpeg,
    check_pixels,
    faults_of,
    open_undecoded,
    prefix_errors,
    read_image_file,
    read_stream,
)
from vitrail.data.images import TURNS, open_image, orientation, upright
from vitrail.data.preprocessing import FILTERS, Preprocessing, cropped, frame, mode_of, resized_within

FINER = 2  # times as many rows and columns as are needed stay in a JPEG that is decoded smaller
SMALL = 2**20  # pixels: beyond, Pillow decodes a JPEG sooner than it takes over simplejpeg's pixels
LYING = (5, 6, 7, 8)  # orientations that swap rows and columns


def framed(
    source: Any, preprocessing: Preprocessing, limits: Limits = DEFAULT, *, scaled: bool = False
) -> NDArray[np.uint8]:
    """What the model sees of a picture before it is normalised: (rows, columns, channels).

    `source` is whatever `open_image` takes, and the numbers are those of `frame(open_image(source))`. If `scaled`, a
    JPEG much larger than needed is decoded at half, a quarter or an eighth of its size, and they differ a little.
    """
    where = name_of(source)
    with prefix_errors(source), faults_of(where):
        if isinstance(source, str | Path):
            data = read_image_file(source, where, limits)
        elif isinstance(source, bytes | bytearray | memoryview):
            data = bytes(source)
        elif hasattr(source, "read"):
            data = read_stream(source, where, limits)
        else:
            data = None
            if isinstance(source, Image.Image):
                check_pixels(source.height, source.width, where, limits, MOST_JPEG)
        if data is None:
            image = frame(open_image(source), preprocessing)
        else:
            image = from_file(data, where, preprocessing, limits, scaled)
        return np.asarray(image).reshape(image.height, image.width, -1)


def name_of(source: Any) -> str:
    """The name of an image in error messages."""
    if isinstance(source, str | Path):
        return repr(str(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return "the given data"
    return f"the file {getattr(source, 'name', '')!r}" if hasattr(source, "read") else "the given image"


def from_file(data: bytes, where: str, preprocessing: Preprocessing, limits: Limits, scaled: bool) -> Image.Image:
    check_bytes(data, where, limits)
    header = jpeg.header_of(data)
    if header is not None:
        check_jpeg(data, header.rows, header.columns, where, limits, whole=False)
        by = shrinkage(header, preprocessing) if scaled else 1
        if by == 1:
            check_pixels(header.rows, header.columns, where, limits, MOST_WHOLE_JPEG)
        small = header.rows * header.columns <= SMALL * by * by
        pixels = jpeg.decoded(data, header, by) if small else None
        if pixels is not None:
            return from_jpeg(Image.fromarray(pixels), header, by, preprocessing)
    image = open_undecoded(data, where, limits, whole=False)
    if image.format in ("JPEG", "MPO"):
        header = jpeg.Header(image.height, image.width, orientation(image))
        by = shrinkage(header, preprocessing) if scaled else 1
        if by > 1 and image.draft(image.mode, (image.width // by, image.height // by)):
            return from_jpeg(image.convert("RGB"), header, by, preprocessing)
        check_pixels(header.rows, header.columns, where, limits, MOST_WHOLE_JPEG)
    image = upright(image, where)
    return frame(image if image.mode == "RGB" else image.convert("RGB"), preprocessing)


def shrinkage(header: jpeg.Header, preprocessing: Preprocessing) -> int:
    """By how much the JPEG may be decoded smaller, as its decoder can."""
    columns, rows = resized_as_stored(header, preprocessing)
    fewest = min(header.columns / columns, header.rows / rows) / FINER
    return next((by for by in (8, 4, 2) if fewest >= by), 1)


def resized_as_stored(header: jpeg.Header, preprocessing: Preprocessing) -> tuple[int, int]:
    """Columns and rows that the picture is resized to, before it is turned."""
    if header.turn in LYING:
        return resized_within((header.columns, header.rows), preprocessing)
    rows, columns = resized_within((header.rows, header.columns), preprocessing)
    return columns, rows


def from_jpeg(image: Image.Image, header: jpeg.Header, by: int, preprocessing: Preprocessing) -> Image.Image:
    """Framed, of an RGB picture decoded so much smaller and not yet turned."""
    turn = TURNS.get(header.turn)
    if by == 1:
        return frame(image if turn is None else image.transpose(turn), preprocessing)
    box = (0, 0, header.columns / by, header.rows / by)  # without what the last row and column have too much
    size, kernel = resized_as_stored(header, preprocessing), FILTERS[preprocessing.interpolation]
    image = image.convert(mode_of(preprocessing)).resize(size, kernel, box)
    return cropped(image if turn is None else image.transpose(turn), preprocessing)
