"""From a file, or whatever else a picture comes as, to the pixels that a model sees of it, within limits."""

import os
import stat
import struct
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitrail.data import jpeg
from vitrail.data.images import TURNS, faults_of, open_image, orientation, upright
from vitrail.data.preprocessing import FILTERS, Preprocessing, cropped, frame, mode_of, resized_within
from vitrail.errors import ConfigError, DataError

FINER = 2  # times as many rows and columns as are needed stay in a JPEG that is decoded smaller
SMALL = 2**20  # pixels: beyond, Pillow decodes a JPEG sooner than it takes over simplejpeg's pixels
ALONE = {b"\xff\xd8": "PIL.JpegImagePlugin", b"\x89P": "PIL.PngImagePlugin"}  # far sooner imported than all kinds
LYING = (5, 6, 7, 8)  # orientations that swap rows and columns


@dataclass(frozen=True)
class Limits:
    """What a picture may take: what is larger is refused before it is decoded."""

    pixels: int = 178_956_970  # where Pillow itself refuses: 0.7 GB in its memory
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
            check_pixels(source.height, source.width, "the picture given", limits)
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
        raise DataError(f"{where} is empty; expected a picture, not zero bytes")
    header = jpeg.header_of(data)
    if header is not None:
        check_pixels(header.rows, header.columns, where, limits)
        by = shrinkage(header, preprocessing) if scaled else 1
        small = header.rows * header.columns <= SMALL * by * by
        pixels = jpeg.decoded(data, header, by) if small else None
        if pixels is not None:
            return from_jpeg(Image.fromarray(pixels), header, by, preprocessing)
    with faults_of(where):
        image = undecoded(BytesIO(data))
        check_pixels(image.height, image.width, where, limits)
        if scaled and image.format in ("JPEG", "MPO"):
            header = jpeg.Header(image.height, image.width, orientation(image))
            by = shrinkage(header, preprocessing)
            if by > 1 and image.draft(image.mode, (image.width // by, image.height // by)):
                return from_jpeg(image.convert("RGB"), header, by, preprocessing)
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


def undecoded(file: BytesIO) -> Image.Image:
    """The picture with its header read, as by Image.open but for its limit on pixels, which is the whole process's."""
    head = file.read(16)
    if head[:2] in ALONE:
        import_module(ALONE[head[:2]])
    for more_kinds in (lambda: None, Image.preinit, Image.init):
        more_kinds()
        for factory, accepts in list(Image.OPEN.values()):
            try:
                accepted = accepts(head) if accepts else True
                if accepted and not isinstance(accepted, str):  # or it says what is not installed
                    file.seek(0)
                    return factory(file, "")
            except (SyntaxError, IndexError, TypeError, struct.error):  # of another kind, then
                continue
    raise UnidentifiedImageError


def check_pixels(rows: int, columns: int, where: str, limits: Limits) -> None:
    if rows * columns > limits.pixels:
        most = f"at most {limits.pixels} pixels: if it is no decompression bomb, raise the limit on pixels"
        raise DataError(f"{where} is {rows}×{columns} pixels; expected {most}")


def too_long(where: str, count: str, limits: Limits) -> DataError:
    return DataError(f"{where} has {count} bytes; expected at most {limits.bytes}: raise the limit on bytes")
