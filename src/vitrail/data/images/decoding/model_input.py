"""Decode an image to the pixels of a model's input, within limits; a transform that data loaders can pickle."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.images.decoding.image_formats import (
    DEFAULT_LIMITS,
    EXIF_TRANSPOSES,
    ImageLimits,
    check_pixels,
    open_with_plugin,
    prefix_errors_with_path,
    read_encoded_bytes_and_name,
    wrap_image_errors,
)
from vitrail.data.images.decoding.jpeg import (
    MAX_REDUCED_PIXELS,
    SWAPPED_ORIENTATIONS,
    JpegHeader,
    decode_jpeg,
    find_largest_jpeg_divisor,
    is_jpeg,
)
from vitrail.data.images.decoding.rgb_image import get_pillow_or_default_limits, open_image, to_upright_8_bit
from vitrail.data.images.preprocessing import (
    PILLOW_FILTERS,
    Preprocessing,
    center_crop,
    compute_checked_resize_size,
    get_pillow_mode,
    normalize_pixels,
    resize_and_crop,
)

if TYPE_CHECKING:
    import torch


MIN_OVERSAMPLING = 2  # a reduced JPEG keeps at least this many times the rows and columns that are needed
MIN_REDUCED_JPEG_PIXELS = 2**18  # a smaller JPEG decodes in about a millisecond, so it is always decoded at full size
MAX_SIMPLEJPEG_PIXELS = 2**20  # for more, Pillow is faster than simplejpeg and the conversion of its pixels


def decode_for_model(
    source: Any, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS, *, reduce_jpeg: bool = False
) -> NDArray[np.uint8]:
    """The model input before normalization: (rows, columns, channels).

    `source` is any input of `open_image`; the pixels are those of `resize_and_crop(open_image(source))`. With
    `reduce_jpeg` a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which changes them slightly.
    """
    with prefix_errors_with_path(source):
        data, where = read_encoded_bytes_and_name(source, limits)
        with wrap_image_errors(where):
            if isinstance(source, Image.Image):
                check_pixels(source.height, source.width, where, limits, MAX_REDUCED_PIXELS)
            if data is None:
                image = resize_and_crop(open_image(source), preprocessing)
            else:
                image = decode_bytes_for_model(data, where, preprocessing, limits, reduce_jpeg)
            return np.asarray(image).reshape(image.height, image.width, -1)


def decode_bytes_for_model(
    data: bytes, where: str, preprocessing: Preprocessing, limits: ImageLimits, reduce_jpeg: bool
) -> Image.Image:
    if not is_jpeg(data):
        image = to_upright_8_bit(open_with_plugin(data, where, limits), where)
        return resize_and_crop(image if image.mode == "RGB" else image.convert("RGB"), preprocessing)
    pixels, header, divisor = decode_jpeg(
        data,
        where,
        limits,
        lambda header: jpeg_divisor_for_model(header, preprocessing) if reduce_jpeg else 1,
        max_pixels=MAX_REDUCED_PIXELS,
        max_simplejpeg_pixels=MAX_SIMPLEJPEG_PIXELS,
    )
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    return resize_decoded_jpeg(image, header, divisor, preprocessing)


def jpeg_divisor_for_model(header: JpegHeader, preprocessing: Preprocessing) -> int:
    """The divisor of the decoded size that leaves enough pixels for the resize; 1 for a small image."""
    if header.rows * header.columns < MIN_REDUCED_JPEG_PIXELS:
        return 1
    columns, rows = compute_stored_resize_size(header, preprocessing)
    min_size = (MIN_OVERSAMPLING * rows, MIN_OVERSAMPLING * columns)
    return find_largest_jpeg_divisor((header.rows, header.columns), min_size)


def compute_stored_resize_size(header: JpegHeader, preprocessing: Preprocessing) -> tuple[int, int]:
    """Columns and rows of the resized image, before its orientation is applied."""
    rows, columns = compute_checked_resize_size(header.upright_size, preprocessing)
    return (rows, columns) if header.orientation in SWAPPED_ORIENTATIONS else (columns, rows)


def resize_decoded_jpeg(
    image: Image.Image, header: JpegHeader, divisor: int, preprocessing: Preprocessing
) -> Image.Image:
    """Resize, rotate and crop an RGB image that was decoded at size / divisor and is not upright yet."""
    transpose = EXIF_TRANSPOSES.get(header.orientation)
    if divisor == 1:
        return resize_and_crop(image if transpose is None else image.transpose(transpose), preprocessing)
    box = (0, 0, header.columns / divisor, header.rows / divisor)  # the last row and column may be partial
    size, kernel = compute_stored_resize_size(header, preprocessing), PILLOW_FILTERS[preprocessing.interpolation]
    image = image.convert(get_pillow_mode(preprocessing)).resize(size, kernel, box)
    return center_crop(image if transpose is None else image.transpose(transpose), preprocessing)


@dataclass(frozen=True)
class ImageTransform:
    """A transform as torchvision's: a photo → a tensor (C, rows, columns) on the CPU.

    A photo is a path, bytes, a Pillow image, an array or a tensor. Without a dtype the result is what an exported model
    takes: an array of uint8 (rows, columns, C), not normalized.
    """

    preprocessing: Preprocessing
    dtype: "torch.dtype | None" = None

    def __call__(self, photo: Any) -> Any:
        pixels = decode_for_model(photo, self.preprocessing, get_pillow_or_default_limits())
        if self.dtype is None:
            return pixels
        import torch

        return torch.from_numpy(normalize_pixels(pixels, self.preprocessing)).to(self.dtype)
