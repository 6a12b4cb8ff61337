"""Decode an image to the pixels of a model's input, within limits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.images.decoding import jpeg
from vitrail.data.images.decoding.image_formats import (
    DEFAULT_LIMITS,
    MAX_FULL_JPEG_PIXELS,
    MAX_REDUCED_JPEG_PIXELS,
    ImageLimits,
    check_file_size,
    check_jpeg_pixels_and_scans,
    check_pixels,
    open_undecoded,
    prefix_errors_with_path,
    read_encoded_bytes_and_name,
    wrap_image_errors,
)
from vitrail.data.images.decoding.rgb_image import (
    EXIF_TRANSPOSES,
    SWAPPED_ORIENTATIONS,
    open_image,
    read_exif_orientation,
    to_upright_8_bit,
)
from vitrail.data.images.preprocessing import (
    PILLOW_FILTERS,
    Preprocessing,
    center_crop,
    compute_checked_resize_size,
    get_pillow_mode,
    resize_and_crop,
)

MIN_OVERSAMPLING = 2  # a reduced JPEG keeps at least this many times the rows and columns that are needed
MIN_REDUCED_JPEG_PIXELS = 2**18  # a smaller JPEG decodes in about a millisecond, so it is always decoded at full size
MAX_SIMPLEJPEG_PIXELS = 2**20  # for more, Pillow is faster than simplejpeg and the conversion of its pixels


def decode_for_model(
    source: Any, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS, *, reduce_jpeg: bool = False
) -> NDArray[np.uint8]:
    """The model input before normalisation: (rows, columns, channels).

    `source` is any input of `open_image`; the pixels are those of `resize_and_crop(open_image(source))`. With
    `reduce_jpeg` a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which changes them slightly.
    """
    with prefix_errors_with_path(source):
        data, where = read_encoded_bytes_and_name(source, limits)
        with wrap_image_errors(where):
            if isinstance(source, Image.Image):
                check_pixels(source.height, source.width, where, limits, MAX_REDUCED_JPEG_PIXELS)
            if data is None:
                image = resize_and_crop(open_image(source), preprocessing)
            else:
                image = decode_bytes_for_model(data, where, preprocessing, limits, reduce_jpeg)
            return np.asarray(image).reshape(image.height, image.width, -1)


def decode_bytes_for_model(
    data: bytes, where: str, preprocessing: Preprocessing, limits: ImageLimits, reduce_jpeg: bool
) -> Image.Image:
    check_file_size(data, where, limits)
    header = jpeg.read_jpeg_header(data)
    if header is not None:
        check_jpeg_pixels_and_scans(data, header.rows, header.columns, where, limits, full_size=False)
        divisor = jpeg_divisor_for_model(header, preprocessing) if reduce_jpeg else 1
        if divisor == 1:
            check_pixels(header.rows, header.columns, where, limits, MAX_FULL_JPEG_PIXELS)
        small = header.rows * header.columns <= MAX_SIMPLEJPEG_PIXELS * divisor * divisor
        pixels = jpeg.try_decode_jpeg(data, header, divisor) if small else None
        if pixels is not None:
            return resize_decoded_jpeg(Image.fromarray(pixels), header, divisor, preprocessing)
    image = open_undecoded(data, where, limits, full_size=False)
    if image.format in ("JPEG", "MPO"):
        header = jpeg.JpegHeader(image.height, image.width, read_exif_orientation(image))
        divisor = jpeg_divisor_for_model(header, preprocessing) if reduce_jpeg else 1
        if divisor > 1 and image.draft(image.mode, (image.width // divisor, image.height // divisor)):
            return resize_decoded_jpeg(image.convert("RGB"), header, divisor, preprocessing)
        check_pixels(header.rows, header.columns, where, limits, MAX_FULL_JPEG_PIXELS)
    image = to_upright_8_bit(image, where)
    return resize_and_crop(image if image.mode == "RGB" else image.convert("RGB"), preprocessing)


def jpeg_divisor_for_model(header: jpeg.JpegHeader, preprocessing: Preprocessing) -> int:
    """The divisor of the decoded size that leaves enough pixels for the resize; 1 for a small image."""
    if header.rows * header.columns < MIN_REDUCED_JPEG_PIXELS:
        return 1
    columns, rows = compute_stored_resize_size(header, preprocessing)
    min_size = (MIN_OVERSAMPLING * rows, MIN_OVERSAMPLING * columns)
    return jpeg.find_largest_jpeg_divisor((header.rows, header.columns), min_size)


def compute_stored_resize_size(header: jpeg.JpegHeader, preprocessing: Preprocessing) -> tuple[int, int]:
    """Columns and rows of the resized image, before its orientation is applied."""
    if header.orientation in SWAPPED_ORIENTATIONS:
        return compute_checked_resize_size((header.columns, header.rows), preprocessing)
    rows, columns = compute_checked_resize_size((header.rows, header.columns), preprocessing)
    return columns, rows


def resize_decoded_jpeg(
    image: Image.Image, header: jpeg.JpegHeader, divisor: int, preprocessing: Preprocessing
) -> Image.Image:
    """Resize, rotate and crop an RGB image that was decoded at size / divisor and is not upright yet."""
    transpose = EXIF_TRANSPOSES.get(header.orientation)
    if divisor == 1:
        return resize_and_crop(image if transpose is None else image.transpose(transpose), preprocessing)
    box = (0, 0, header.columns / divisor, header.rows / divisor)  # the last row and column may be partial
    size, kernel = compute_stored_resize_size(header, preprocessing), PILLOW_FILTERS[preprocessing.interpolation]
    image = image.convert(get_pillow_mode(preprocessing)).resize(size, kernel, box)
    return center_crop(image if transpose is None else image.transpose(transpose), preprocessing)
