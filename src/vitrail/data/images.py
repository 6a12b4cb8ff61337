"""Any picture as 8-bit RGB, upright: from a file, bytes, Pillow, numpy or a tensor."""

from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from vitrail.errors import DataError, VitrailError, one_line

TURNS = {  # EXIF's orientation → what sets the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
AS_ARRAY = "an array (rows, columns) or (rows, columns, 1, 3 or 4)"
AS_TENSOR = "a tensor (1 or 3, rows, columns)"


def open_image(source: Any) -> Image.Image:
    """The picture upright and in RGB, its transparent parts over white; what cannot be read is a DataError.

    `source` is a path, bytes, a binary file, a Pillow image, an array (rows, columns[, 1, 3 or 4]) or a tensor
    (1 or 3, rows, columns), these two of uint8, of bool or of floats from 0 to 1.
    """
    if isinstance(source, str | Path):
        return decoded(source, repr(str(source)))
    if isinstance(source, bytes | bytearray | memoryview):
        return decoded(BytesIO(source), "the bytes given")
    if hasattr(source, "read"):
        return decoded(source, f"the file {getattr(source, 'name', '')!r}")
    if isinstance(source, Image.Image):
        with faults_of("the picture given"):
            return upright_rgb(source, "the picture given")
    if isinstance(source, np.ndarray):
        return upright_rgb(from_array(source), "the array given")
    if hasattr(source, "detach") and hasattr(source, "numpy"):
        with faults_of("the tensor given"):
            return upright_rgb(from_tensor(source), "the tensor given")
    kinds = f"a path, bytes, a binary file, a Pillow image, {AS_ARRAY} or {AS_TENSOR}"
    raise DataError(f"the picture is a {type(source).__name__}; expected {kinds}")


def decoded(file: Any, where: str) -> Image.Image:
    with opened(file, where) as image:
        return upright_rgb(image, where)


@contextmanager
def opened(file: Any, where: str) -> Generator[Image.Image]:
    """The picture with its header read and its pixels not."""
    with faults_of(where), Image.open(file) as image:
        # Pillow only warns up to twice its limit; nothing is decoded yet
        if image.width * image.height > (Image.MAX_IMAGE_PIXELS or float("inf")):
            raise too_large(where)
        yield image


@contextmanager
def faults_of(where: str) -> Generator[None]:
    """Whatever goes wrong inside is a DataError of one line that begins with `where`."""
    try:
        yield
    except VitrailError:
        raise
    except FileNotFoundError:
        raise DataError(f"{where} does not exist; expected a picture") from None
    except IsADirectoryError:
        raise DataError(f"{where} is a folder; expected a picture: give its files one by one") from None
    except UnidentifiedImageError:
        raise DataError(f"{where} is no picture; expected one of a kind that Pillow reads, say JPEG or PNG") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large(where) from None
    except Exception as error:  # on broken bytes Pillow's plugins raise anything
        raise DataError(f"{where} cannot be read: {one_line(error)}; expected a picture, whole and readable") from None


def too_large(where: str) -> DataError:
    limit = f"at most {Image.MAX_IMAGE_PIXELS} pixels: if it is no decompression bomb, raise PIL.Image.MAX_IMAGE_PIXELS"
    return DataError(f"{where} is too large; expected {limit}")


def upright_rgb(image: Image.Image, where: str) -> Image.Image:
    image = upright(image, where).convert("RGB")
    image.info = {}  # with its EXIF, or the picture would be turned again by the next who looks at it
    return image


def upright(image: Image.Image, where: str) -> Image.Image:
    """8 bits a channel and nothing transparent; the picture itself if it is so already."""
    if 0 in image.size:
        raise DataError(f"{where} is {image.height}×{image.width} pixels; expected at least one")
    image.load()
    turn = TURNS.get(orientation(image))
    if turn is not None:
        image = image.transpose(turn)
    if image.mode.startswith("I"):
        image = from_16_bits(image, where)
    if image.mode == "F":
        raise DataError(f"{where} is of floats; expected 8 or 16 bits: give an array of floats from 0 to 1")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image


def orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF, but the pixels are there
        return 1


def from_16_bits(image: Image.Image, where: str) -> Image.Image:
    """To 8 bits by value, where Pillow would clip; its mode I is how it gives 16-bit PGM files."""
    values = np.asarray(image).astype(np.int64)
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:
        raise DataError(f"{where} has values from {low} to {high}; expected 16 bits, 0 to 65535")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def from_array(array: np.ndarray[Any, Any], expected: str = AS_ARRAY) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if 0 in array.shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        hint = ": move the channels to the back with np.moveaxis(array, 0, -1)" if is_channels_first(array) else ""
        raise DataError(f"the array is of shape {array.shape}; expected {expected}{hint}")
    if array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype.kind == "f":
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 1):  # NaN is neither
            raise DataError(f"the floats go from {low:g} to {high:g}; expected 0 to 1: divide pixels of 255 by 255")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise DataError(f"the values are {array.dtype}; expected uint8, bool, or floats from 0 to 1: convert them")
    return Image.fromarray(array)


def is_channels_first(array: np.ndarray[Any, Any]) -> bool:
    return array.ndim == 3 and array.shape[0] in (1, 3, 4)


def from_tensor(tensor: Any) -> Image.Image:
    """Through numpy: torch itself is not needed here."""
    shape = tuple(tensor.shape)
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"the tensor is of shape {shape}; expected {AS_TENSOR}, one picture without a batch")
    tensor = tensor.detach().cpu()
    values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # numpy has no bfloat16
    return from_array(np.moveaxis(values, 0, -1), AS_TENSOR)
