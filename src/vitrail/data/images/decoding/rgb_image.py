"""Open any image as upright 8-bit RGB: from a file, bytes, Pillow, numpy or a tensor."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image, ImageFile

from vitrail.base.errors import DataError
from vitrail.data.images.decoding.image_formats import (
    DEFAULT_LIMITS,
    EXIF_TRANSPOSES,
    PILLOW_FORMATS,
    ImageLimits,
    open_with_plugin,
    read_encoded_bytes_and_name,
    read_exif_orientation,
    read_image_file,
    wrap_image_errors,
)
from vitrail.data.images.decoding.jpeg import is_jpeg, open_jpeg

PILLOW_DEFAULT_MAX_PIXELS = 89_478_485  # Pillow's default of PIL.Image.MAX_IMAGE_PIXELS
STRIP_PIXELS = 2**20  # pixels converted at once
EXPECTED_ARRAY = "an array (rows, columns) or (rows, columns, 1, 3 or 4)"
EXPECTED_TENSOR = "a tensor (1 or 3, rows, columns)"


@runtime_checkable
class TensorLike(Protocol):
    """A tensor of torch, without importing it."""

    ndim: int

    def detach(self) -> Any: ...
    def numpy(self, *, force: bool = False) -> Any: ...


def open_image(source: Any) -> Image.Image:
    """The image, upright and in RGB, transparent parts over white; a DataError if it cannot be read.

    `source` is a path, bytes, a binary file, a Pillow image, an array (rows, columns[, 1, 3 or 4]) or a tensor
    (1 or 3, rows, columns), these two of uint8, of bool or of floats from 0 to 1.
    """
    limits = get_pillow_or_default_limits()
    data, where = read_encoded_bytes_and_name(source, limits)
    if data is not None:
        return open_encoded_image(data, where, limits)
    if isinstance(source, Image.Image):
        with wrap_image_errors(where):
            check_pillow_format(source)
            return to_rgb(to_upright_8_bit(source, where), shared=source)
    if isinstance(source, np.ndarray):
        with wrap_image_errors("the given array"):
            return to_rgb(to_upright_8_bit(pillow_image_from_array(source), "the given array"))
    if isinstance(source, TensorLike):
        with wrap_image_errors("the given tensor"):
            return to_rgb(to_upright_8_bit(pillow_image_from_tensor(source), "the given tensor"))
    kinds = f"a path, bytes, a binary file, a Pillow image, {EXPECTED_ARRAY} or {EXPECTED_TENSOR}"
    raise DataError(f"the image is a {type(source).__name__}; expected {kinds}")


def open_encoded_image(data: bytes, where: str, limits: ImageLimits) -> Image.Image:
    with wrap_image_errors(where), open_undecoded(data, where, limits) as image:
        return to_rgb(to_upright_8_bit(image, where))


def open_undecoded(data: bytes, where: str, limits: ImageLimits) -> Image.Image:
    """The image with its header read and checked, not yet decoded."""
    return open_jpeg(data, where, limits) if is_jpeg(data) else open_with_plugin(data, where, limits)


def open_undecoded_file(path: str | Path) -> Image.Image:
    """The image in a file, not yet decoded, within the default limits."""
    where = str(path)
    with wrap_image_errors(where):
        return open_undecoded(read_image_file(path, where, DEFAULT_LIMITS), where, DEFAULT_LIMITS)


def get_pillow_or_default_limits() -> ImageLimits:
    """PIL.Image.MAX_IMAGE_PIXELS if it was changed (None: no limit), otherwise the limits by format."""
    if Image.MAX_IMAGE_PIXELS == PILLOW_DEFAULT_MAX_PIXELS:
        return DEFAULT_LIMITS
    return ImageLimits(pixels=sys.maxsize if Image.MAX_IMAGE_PIXELS is None else max(1, int(Image.MAX_IMAGE_PIXELS)))


def check_pillow_format(image: Image.Image) -> None:
    """Refuses an undecoded Pillow image of an unsupported format: decoding some formats starts a program."""
    if isinstance(image, ImageFile.ImageFile) and image.tile and image.format not in PILLOW_FORMATS:
        given = f"the given image is an undecoded {image.format} file"
        raise DataError(f"{given}; expected one of {', '.join(PILLOW_FORMATS)}, or its pixels: call its load() first")


def to_rgb(image: Image.Image, shared: Image.Image | None = None) -> Image.Image:
    """The image in RGB, detached from its file and EXIF, which would rotate it again; copied only if it is `shared`."""
    if image.mode != "RGB" or image is shared:
        image = image.convert("RGB")
    elif type(image) is not Image.Image:  # opened from a file: keep its pixels, without a copy
        image = image._new(image.im)  # pyright: ignore[reportPrivateUsage]
    image.info = {}
    return image


def to_upright_8_bit(image: Image.Image, where: str) -> Image.Image:
    """The image upright, with 8 bits per channel and without transparency; a copy only if something changes."""
    if 0 in image.size:
        raise DataError(f"{where} is {image.height}×{image.width} pixels; expected at least one")
    image.load()
    transpose = EXIF_TRANSPOSES.get(read_exif_orientation(image))
    if transpose is not None:
        image = image.transpose(transpose)
    if image.mode.startswith("I"):
        return reduce_image_to_8_bits(image, where)
    if image.mode == "F":
        raise DataError(f"{where} has float pixels; expected 8 or 16 bits: pass an array of floats from 0 to 1")
    return convert_in_strips(image, "RGB", blend_over_white) if image.has_transparency_data else image


def convert_in_strips(image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert a few rows at a time, so that a large image is never held in memory with wider pixels."""
    result, rows = Image.new(mode, image.size), max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        result.paste(convert(strip), (0, top))
    return result


def blend_over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def reduce_image_to_8_bits(image: Image.Image, where: str) -> Image.Image:
    """Scale 16-bit values to 8 bits, which Pillow would clip; its mode I has 32 bits, of which 16 may be used."""
    extremes: Any = image.getextrema() if image.mode == "I" else (0, 0)  # the 16-bit modes cannot exceed 16 bits
    low, high = extremes
    if low < 0 or high > 65535:
        raise DataError(f"{where} has values from {low} to {high}; expected 16 bits, 0 to 65535")

    def scale(strip: Image.Image) -> Image.Image:
        return Image.fromarray(((np.asarray(strip).astype(np.uint32) + 128) // 257).astype(np.uint8))

    return convert_in_strips(image, "L", scale)


def pillow_image_from_array(array: np.ndarray[Any, Any], expected: str = EXPECTED_ARRAY) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if 0 in array.shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        hint = ": move the channels to the back with np.moveaxis(array, 0, -1)" if is_channels_first(array) else ""
        raise DataError(f"the array has shape {array.shape}; expected {expected}{hint}")
    if array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype.kind == "f":
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise DataError(f"the floats go from {low:g} to {high:g}; expected 0 to 1: divide values up to 255 by 255")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise DataError(f"the values are {array.dtype}; expected uint8, bool, or floats from 0 to 1: convert them")
    return Image.fromarray(array)


def is_channels_first(array: np.ndarray[Any, Any]) -> bool:
    return array.ndim == 3 and array.shape[0] in (1, 3, 4)


def pillow_image_from_tensor(tensor: Any) -> Image.Image:
    """Convert through numpy, without importing torch."""
    shape = tuple(tensor.shape)
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(
            f"the tensor has shape {shape}; expected {EXPECTED_TENSOR}, one image without a batch dimension"
        )
    tensor = tensor.detach().cpu()
    values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # numpy has no bfloat16
    return pillow_image_from_array(np.moveaxis(values, 0, -1), EXPECTED_TENSOR)
