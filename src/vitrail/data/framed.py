"""From a file, or whatever else a picture comes as, to the pixels that a model sees of it, within limits."""

import os
import stat
import struct
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitrail.data.images import TURNS, faults_of, open_image, orientation, upright
from vitrail.data.preprocessing import FILTERS, Preprocessing, cropped, frame, mode_of, resized_within
from vitrail.errors import ConfigError, DataError

FINER = 2  # times as many rows and columns as are needed stay in a JPEG that is decoded smaller


@dataclass(frozen=True)
class Limits:
    """What a picture may take: what is larger is refused before it is decoded."""

    pixels: int = 178_956_970  # Pillow's: half a gigabyte of RGB
    bytes: int = 2**28  # of its file

    def __post_init__(self) -> None:
        for name, value in (("pixels", self.pixels), ("bytes", self.bytes)):
            if value < 1:
                raise ConfigError(f"the limit on {name} is {value}; expected 1 or more")


DEFAULT = Limits()


def framed(
    source: Any, preprocessing: Preprocessing, limits: Limits = DEFAULT, *, scaled: bool = False
) -> NDArray[np.uint8]:
    """What the model sees of a picture before it is normalised: (rows, columns, channels).

    `source` is whatever `open_image` takes, and the numbers are those of `frame(open_image(source))`. If `scaled`, a
    JPEG much larger than needed is decoded at half, a quarter or an eighth of its size, and they differ a little.
    """
    if isinstance(source, str | Path):
        where = repr(str(source))
        image = from_file(contents(source, where, limits), where, preprocessing, limits, scaled)
    elif isinstance(source, bytes | bytearray | memoryview):
        image = from_file(bytes(source), "the bytes given", preprocessing, limits, scaled)
    elif hasattr(source, "read"):
        where = f"the file {getattr(source, 'name', '')!r}"
        image = from_file(all_of(source, where, limits), where, preprocessing, limits, scaled)
    else:
        if isinstance(source, Image.Image):
            check_pixels(source, "the picture given", limits)
        image = frame(open_image(source), preprocessing)
    return np.asarray(image).reshape(image.height, image.width, -1)


def contents(path: str | Path, where: str, limits: Limits) -> bytes:
    with faults_of(where):
        found = os.stat(path)  # noqa: PTH116  # before it is opened: that would wait for whoever writes to a pipe
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{where} is a pipe, a socket or a device; expected a file: give its bytes instead")
        if found.st_size > limits.bytes:
            raise too_long(where, f"{found.st_size}", limits)
        with Path(path).open("rb", buffering=0) as file:
            return file.readall()


def all_of(file: Any, where: str, limits: Limits) -> bytes:
    """From its beginning, and left there where it can be."""
    with faults_of(where):
        again = getattr(file, "seekable", bool)()
        if again:
            file.seek(0)
        data = bytes(file.read(limits.bytes + 1))
        if again:
            file.seek(0)
    return data


def from_file(data: bytes, where: str, preprocessing: Preprocessing, limits: Limits, scaled: bool) -> Image.Image:
    if len(data) > limits.bytes:
        raise too_long(where, "more", limits)
    if not data:
        raise DataError(f"{where} is empty; expected a picture, and not a file of zero bytes")
    with faults_of(where):
        image = undecoded(BytesIO(data))
        check_pixels(image, where, limits)
        if scaled and image.format in ("JPEG", "MPO"):
            return decoded_smaller(image, where, preprocessing)
        return framed_whole(image, where, preprocessing)


def framed_whole(image: Image.Image, where: str, preprocessing: Preprocessing) -> Image.Image:
    image = upright(image, where)
    return frame(image if image.mode == "RGB" else image.convert("RGB"), preprocessing)


def decoded_smaller(image: Image.Image, where: str, preprocessing: Preprocessing) -> Image.Image:
    """The picture as `frame` gives it, from as few pixels of a JPEG as do; turned when it is small."""
    turn = orientation(image)
    lies = turn in (5, 6, 7, 8)
    rows, columns = resized_within((image.width, image.height) if lies else (image.height, image.width), preprocessing)
    size = (rows, columns) if lies else (columns, rows)  # as it is stored, and as Pillow counts
    fits = (
        by for by in (8, 4, 2) if all(have >= by * FINER * want for have, want in zip(image.size, size, strict=True))
    )
    by = next(fits, 1)
    smaller = image.draft(image.mode, (image.width // by, image.height // by)) if by > 1 else None
    if smaller is None:
        return framed_whole(image, where, preprocessing)
    _, box = smaller  # without what the last block has too much
    image = image.convert("RGB").convert(mode_of(preprocessing)).resize(size, FILTERS[preprocessing.interpolation], box)
    return cropped(image.transpose(TURNS[turn]) if turn in TURNS else image, preprocessing)


def undecoded(file: BytesIO) -> Image.Image:
    """The picture with its header read, as by Image.open but for its limit on pixels, which is the whole process's."""
    head = file.read(16)
    for more_kinds in (Image.preinit, Image.init):
        more_kinds()
        for factory, accepts in list(Image.OPEN.values()):
            accepted = accepts(head) if accepts else True
            if accepted and not isinstance(accepted, str):  # or it says what is not installed
                file.seek(0)
                try:
                    return factory(file, "")
                except (SyntaxError, IndexError, TypeError, struct.error):  # of another kind, then
                    continue
    raise UnidentifiedImageError


def check_pixels(image: Image.Image, where: str, limits: Limits) -> None:
    if image.width * image.height > limits.pixels:
        given = f"{where} is {image.height}×{image.width} pixels"
        most = f"at most {limits.pixels} pixels"
        raise DataError(f"{given}; expected {most}: if it is no decompression bomb, raise the limit on pixels")


def too_long(where: str, count: str, limits: Limits) -> DataError:
    return DataError(f"{where} has {count} bytes; expected at most {limits.bytes}: raise the limit on bytes")
