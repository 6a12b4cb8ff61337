"""From a file, or whatever else a picture comes as, to the pixels that a model sees of it, within limits."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.decoding import jpeg
from vitrail.data.decoding.image_formats import (
    DEFAULT_LIMITS,
    MAX_FULL_JPEG_PIXELS,
    MAX_REDUCED_JPEG_PIXELS,
    ImageLimits,
    check_file_size,
    check_jpeg,
    check_pixels,
    open_undecoded,
    prefix_errors_with_path,
    read_image_file,
    read_stream,
    wrap_image_errors,
)
from vitrail.data.decoding.rgb_image import EXIF_TRANSPOSES, open_image, read_exif_orientation, to_upright_8_bit
from vitrail.data.preprocessing import (
    PILLOW_FILTERS,
    Preprocessing,
    center_crop,
    compute_checked_resize_size,
    get_pillow_mode,
    resize_and_crop,
)

MIN_OVERSAMPLING = 2  # times as many rows and columns as are needed stay in a JPEG that is decoded smaller
MAX_SIMPLEJPEG_PIXELS = 2**20  # pixels: beyond, Pillow decodes a JPEG sooner than it takes over simplejpeg's pixels
SWAPPED_ORIENTATIONS = (5, 6, 7, 8)  # orientations that swap rows and columns


def decode_for_model(
    source: Any, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS, *, reduce_jpeg: bool = False
) -> NDArray[np.uint8]:
    """What the model sees of a picture before it is normalised: (rows, columns, channels).

    `source` is whatever `open_image` takes, and the numbers are those of `frame(open_image(source))`. If `scaled`, a
    JPEG much larger than needed is decoded at half, a quarter or an eighth of its size, and they differ a little.
    """
    where = format_source_name(source)
    with prefix_errors_with_path(source), wrap_image_errors(where):
        if isinstance(source, str | Path):
            data = read_image_file(source, where, limits)
        elif isinstance(source, bytes | bytearray | memoryview):
            data = bytes(source)
        elif hasattr(source, "read"):
            data = read_stream(source, where, limits)
        else:
            data = None
            if isinstance(source, Image.Image):
                check_pixels(source.height, source.width, where, limits, MAX_REDUCED_JPEG_PIXELS)
        if data is None:
            image = resize_and_crop(open_image(source), preprocessing)
        else:
            image = decode_bytes_for_model(data, where, preprocessing, limits, reduce_jpeg)
        return np.asarray(image).reshape(image.height, image.width, -1)


def format_source_name(source: Any) -> str:
    """The name of an image in error messages."""
    if isinstance(source, str | Path):
        return repr(str(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return "the given data"
    return f"the file {getattr(source, 'name', '')!r}" if hasattr(source, "read") else "the given image"


def decode_bytes_for_model(
    data: bytes, where: str, preprocessing: Preprocessing, limits: ImageLimits, scaled: bool
) -> Image.Image:
    check_file_size(data, where, limits)
    header = jpeg.read_jpeg_header(data)
    if header is not None:
        check_jpeg(data, header.rows, header.columns, where, limits, whole=False)
        by = jpeg_divisor_for_model(header, preprocessing) if scaled else 1
        if by == 1:
            check_pixels(header.rows, header.columns, where, limits, MAX_FULL_JPEG_PIXELS)
        small = header.rows * header.columns <= MAX_SIMPLEJPEG_PIXELS * by * by
        pixels = jpeg.decode_jpeg(data, header, by) if small else None
        if pixels is not None:
            return resize_decoded_jpeg(Image.fromarray(pixels), header, by, preprocessing)
    image = open_undecoded(data, where, limits, whole=False)
    if image.format in ("JPEG", "MPO"):
        header = jpeg.JpegHeader(image.height, image.width, read_exif_orientation(image))
        by = jpeg_divisor_for_model(header, preprocessing) if scaled else 1
        if by > 1 and image.draft(image.mode, (image.width // by, image.height // by)):
            return resize_decoded_jpeg(image.convert("RGB"), header, by, preprocessing)
        check_pixels(header.rows, header.columns, where, limits, MAX_FULL_JPEG_PIXELS)
    image = to_upright_8_bit(image, where)
    return resize_and_crop(image if image.mode == "RGB" else image.convert("RGB"), preprocessing)


def jpeg_divisor_for_model(header: jpeg.JpegHeader, preprocessing: Preprocessing) -> int:
    """By how much the JPEG may be decoded smaller, as its decoder can."""
    columns, rows = compute_stored_resize_size(header, preprocessing)
    fewest = min(header.columns / columns, header.rows / rows) / MIN_OVERSAMPLING
    return next((by for by in (8, 4, 2) if fewest >= by), 1)


def compute_stored_resize_size(header: jpeg.JpegHeader, preprocessing: Preprocessing) -> tuple[int, int]:
    """Columns and rows that the picture is resized to, before it is turned."""
    if header.orientation in SWAPPED_ORIENTATIONS:
        return compute_checked_resize_size((header.columns, header.rows), preprocessing)
    rows, columns = compute_checked_resize_size((header.rows, header.columns), preprocessing)
    return columns, rows


def resize_decoded_jpeg(
    image: Image.Image, header: jpeg.JpegHeader, by: int, preprocessing: Preprocessing
) -> Image.Image:
    """Framed, of an RGB picture decoded so much smaller and not yet turned."""
    turn = EXIF_TRANSPOSES.get(header.orientation)
    if by == 1:
        return resize_and_crop(image if turn is None else image.transpose(turn), preprocessing)
    box = (0, 0, header.columns / by, header.rows / by)  # without what the last row and column have too much
    size, kernel = compute_stored_resize_size(header, preprocessing), PILLOW_FILTERS[preprocessing.interpolation]
    image = image.convert(get_pillow_mode(preprocessing)).resize(size, kernel, box)
    return center_crop(image if turn is None else image.transpose(turn), preprocessing)
