"""JPEG: its limits, its orientation, and its decoding at full or reduced size.

simplejpeg decodes if it is installed and bit-identical to Pillow: it imports faster and decodes as fast.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from vitrail.base.errors import DataError
from vitrail.data.images.decoding.image_formats import BoundedFile, ImageLimits, check_pixels, read_exif_orientation

try:
    import simplejpeg
except ImportError:  # Pillow decodes to the same pixels
    simplejpeg: Any = None

MAX_FULL_PIXELS = 89_478_485  # of a baseline JPEG decoded at full size: where Pillow warns
MAX_REDUCED_PIXELS = 178_956_970  # of a baseline JPEG decoded at a reduced size: where Pillow refuses
MAX_SCANNED_PIXELS = 2**32  # pixels × scans
MAX_EXIF_SEGMENTS = 16  # each 64 kB; Pillow joins them one by one
SWAPPED_ORIENTATIONS = (5, 6, 7, 8)  # of EXIF, which swap rows and columns
SIGNATURE = b"\xff\xd8\xff"
EXIF_SHORT_TYPE = 3  # type of the orientation entry
APP1, SOS = 0xE1, 0xDA  # segment markers: EXIF or XMP, and start of scan
EXIF_START = b"Exif\0\0"  # of an APP1 segment
SCAN_MARKER = bytes((0xFF, SOS))
FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start of a frame, one per coding
SEQUENTIAL_FRAME_MARKERS = (0xC0, 0xC1)  # sequential with Huffman codes, not progressive
MARKERS_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xDA)}  # none of them occurs before the first scan
MARKER_PATTERN = re.compile(rb"\xff+[^\xff]", re.DOTALL)
MAX_SEGMENTS = 2**16  # examined per file


class JpegHeader(NamedTuple):
    rows: int
    columns: int
    orientation: int  # of EXIF; rows and columns are those before it is applied

    @property
    def upright_size(self) -> tuple[int, int]:
        swapped = self.orientation in SWAPPED_ORIENTATIONS
        return (self.columns, self.rows) if swapped else (self.rows, self.columns)


class DecodedJpeg(NamedTuple):
    """RGB pixels at size / divisor, rounded up, without the orientation applied; an array if by simplejpeg."""

    pixels: NDArray[np.uint8] | Image.Image
    header: JpegHeader
    divisor: int


def is_jpeg(data: bytes) -> bool:
    return data.startswith(SIGNATURE)


def decode_jpeg(
    data: bytes,
    where: str,
    limits: ImageLimits,
    choose_divisor: Callable[[JpegHeader], int],
    *,
    max_pixels: int = MAX_FULL_PIXELS,
    max_simplejpeg_pixels: int = MAX_REDUCED_PIXELS,
) -> DecodedJpeg:
    """Decode at 1, 1/2, 1/4 or 1/8 of its size, as `choose_divisor` says.

    `max_pixels` are those of a baseline JPEG before it is reduced. If more than `max_simplejpeg_pixels` are decoded,
    Pillow does it.
    """
    header = read_jpeg_header(data)
    if header is not None:
        check_pixels_and_scans(data, header, where, limits, max_pixels)
        divisor = choose_divisor(header)
        if divisor == 1:
            check_pixels(header.rows, header.columns, where, limits, MAX_FULL_PIXELS)
        small = header.rows * header.columns <= max_simplejpeg_pixels * divisor * divisor
        pixels = try_decode_jpeg(data, header, divisor) if small else None
        if pixels is not None:
            return DecodedJpeg(pixels, header, divisor)
    image = open_jpeg(data, where, limits, max_pixels)  # may read another size, and decode what simplejpeg did not
    header = JpegHeader(image.height, image.width, read_exif_orientation(image))
    divisor = choose_divisor(header)
    if divisor > 1:
        image.draft(image.mode, (image.width // divisor, image.height // divisor))
    else:
        check_pixels(header.rows, header.columns, where, limits, MAX_FULL_PIXELS)
    image.load()
    return DecodedJpeg(image if image.mode == "RGB" else image.convert("RGB"), header, divisor)


def open_jpeg(data: bytes, where: str, limits: ImageLimits, max_pixels: int = MAX_FULL_PIXELS) -> Image.Image:
    """The image by Pillow, with its header read and checked, not yet decoded; of an MPO (from phones) the first one."""
    if (count := data.count(EXIF_START)) > MAX_EXIF_SEGMENTS:
        raise DataError(f"{where} has {count} EXIF segments; expected at most {MAX_EXIF_SEGMENTS}: save it again")
    image: Any = import_module("PIL.JpegImagePlugin").jpeg_factory(BoundedFile(data, where), "")
    check_pixels_and_scans(data, JpegHeader(image.height, image.width, 1), where, limits, max_pixels)
    return image


def check_pixels_and_scans(data: bytes, header: JpegHeader, where: str, limits: ImageLimits, max_pixels: int) -> None:
    """Check pixels and scans: each scan covers the image; 10 are usual, a malicious file has thousands."""
    rows, columns, _ = header
    if not needs_full_image_in_memory(data):
        most = limits.pixels if limits.reduced_pixels is None else limits.reduced_pixels
        check_pixels(rows, columns, where, replace(limits, pixels=most), max_pixels)
        return
    check_pixels(rows, columns, where, limits)
    scans, max_scans = data.count(SCAN_MARKER), max(1, MAX_SCANNED_PIXELS // max(1, rows * columns))
    if scans > max_scans:
        raise DataError(f"{where} is a JPEG in {scans} scans; expected at most {max_scans} at this size: save it again")


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """The header of a JPEG; None if it is not a JPEG or Pillow has to decode it."""
    if simplejpeg is None or not is_jpeg(data):
        return None
    try:
        rows, columns, colors, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # Pillow reads it or reports what is wrong
        return None
    orientation = find_jpeg_orientation(data)
    if orientation is None or colors not in ("YCbCr", "RGB", "Gray"):  # Pillow converts CMYK differently
        return None
    return JpegHeader(rows, columns, orientation)


def find_largest_jpeg_divisor(size: tuple[int, int], min_size: tuple[int, int]) -> int:
    """The largest of 8, 4, 2 and 1 that the decoder may divide `size` by without falling below `min_size`."""
    return next((n for n in (8, 4, 2) if size[0] >= n * min_size[0] and size[1] >= n * min_size[1]), 1)


def try_decode_jpeg(data: bytes, header: JpegHeader, divisor: int = 1) -> NDArray[np.uint8] | None:
    """Decode to RGB at size / divisor (1, 2, 4 or 8), rounded up, without applying the orientation; None on failure."""
    rows, columns = -(-header.rows // divisor), -(-header.columns // divisor)
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=rows, min_width=columns)
    except Exception:  # as above; it raises even for warnings of the decoder
        return None
    return pixels if pixels.shape[:2] == (rows, columns) else None


def find_jpeg_orientation(data: bytes) -> int | None:
    """The EXIF orientation, 1 if there is none; None in unusual cases, for instance if only XMP gives one."""
    metadata, kind = list[bytes](), None
    for kind, contents in iterate_segments(data):
        if kind == APP1:
            metadata.append(contents)
    if kind != SOS:  # a segment before the first scan is unusual
        return None
    exif = [each[len(EXIF_START) :] for each in metadata if each.startswith(EXIF_START)]
    orientation = parse_exif_orientation(exif[0]) if len(exif) == 1 else None if exif else 0
    if orientation == 0:
        return None if any(b"Orientation" in each for each in metadata) else 1
    return orientation


def needs_full_image_in_memory(data: bytes) -> bool:
    """Whether the decoder holds the complete image in memory: true unless one scan has all channels."""
    frame = None
    for kind, contents in iterate_segments(data):
        if kind in FRAME_MARKERS and frame is None:
            frame = kind, contents[5:6]
        elif kind in FRAME_MARKERS:
            return True
        elif kind == SOS:
            return frame is None or frame[0] not in SEQUENTIAL_FRAME_MARKERS or not contents or contents[:1] != frame[1]
    return True


def iterate_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The kind and contents of each segment up to the first scan; ends earlier if the JPEG is unusual.

    Any number of fill bytes may precede the byte that gives the kind of a segment.
    """
    position = 2
    for _ in range(MAX_SEGMENTS):
        marker = MARKER_PATTERN.match(data, position)
        if marker is None:
            return
        start = marker.end()
        kind, end = data[start - 1], start + int.from_bytes(data[start : start + 2], "big")
        if kind in MARKERS_WITHOUT_LENGTH or end < start + 2 or end > len(data):
            return
        yield kind, data[start + 2 : end]
        if kind == SOS:
            return
        position = end


def parse_exif_orientation(exif: bytes) -> int | None:
    """The orientation in the first directory of EXIF, 0 if there is none; None in any unusual case."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    try:
        [first] = struct.unpack_from(f"{order}L", exif, 4)
        [count] = struct.unpack_from(f"{order}H", exif, first)
        entries = [struct.unpack_from(f"{order}HHLHxx", exif, first + 2 + 12 * each) for each in range(count)]
    except struct.error:  # truncated
        return None
    matching = [entry for entry in entries if entry[0] == ExifTags.Base.Orientation]
    if not matching:
        return 0
    _, kind, length, orientation = matching[0]
    return orientation if len(matching) == 1 and (kind, length) == (EXIF_SHORT_TYPE, 1) else None
