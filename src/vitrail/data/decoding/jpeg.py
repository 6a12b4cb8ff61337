"""JPEG by simplejpeg, where it is installed and gives Pillow's bits: less to import than Pillow's, and no slower."""

import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags

try:
    import simplejpeg
except ImportError:  # Pillow decodes the same
    simplejpeg: Any = None

EXIF_SHORT_TYPE = 3  # EXIF's number for the type of its orientation
APP1, SOS = 0xE1, 0xDA  # kinds of segments: EXIF or XMP, and the start of a scan
SCAN_MARKER = bytes((0xFF, SOS))
FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start of a frame, one per coding
SEQUENTIAL_FRAME_MARKERS = (0xC0, 0xC1)  # of these: not progressive, with Huffman codes
MARKERS_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xDA)}  # kinds without a length; none occurs before the first scan
MARKER_PATTERN = re.compile(rb"\xff+[^\xff]", re.DOTALL)
MAX_SEGMENTS = 2**16  # that are examined


class JpegHeader(NamedTuple):
    rows: int
    columns: int
    orientation: int  # EXIF's orientation; the sides are those before it


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """Of a JPEG, unless it is left to Pillow: one that only Pillow understands, and what is none."""
    if simplejpeg is None or not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        rows, columns, colours, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # Pillow says what is wrong, or reads it all the same
        return None
    turn = find_jpeg_orientation(data)
    if turn is None or colours not in ("YCbCr", "RGB", "Gray"):  # CMYK becomes RGB by another rule than Pillow's
        return None
    return JpegHeader(rows, columns, turn)


def decode_jpeg(data: bytes, header: JpegHeader, divisor: int = 1) -> NDArray[np.uint8] | None:
    """In RGB at 1, 1/2, 1/4 or 1/8 of its size, its last row and column perhaps no whole ones; not yet turned."""
    rows, columns = -(-header.rows // divisor), -(-header.columns // divisor)
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=rows, min_width=columns)
    except Exception:  # as above; it raises where the decoder so much as warns
        return None
    return pixels if pixels.shape[:2] == (rows, columns) else None


def find_jpeg_orientation(data: bytes) -> int | None:
    """EXIF's orientation, 1 if it has none; None if that takes a closer look, as where XMP alone tells of one."""
    notes, kind = list[bytes](), None
    for kind, contents in iterate_segments(data):
        if kind == APP1:
            notes.append(contents)
    if kind != SOS:  # the walk got lost
        return None
    exif = [note[6:] for note in notes if note.startswith(b"Exif\0\0")]
    turn = parse_exif_orientation(exif[0]) if len(exif) == 1 else None if exif else 0
    if turn == 0:
        return None if any(b"Orientation" in note for note in notes) else 1
    return turn


def decodes_whole_in_memory(data: bytes) -> bool:
    """Whether decoding holds the whole image in memory: true unless its only scan has all channels."""
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
    at = 2
    for _ in range(MAX_SEGMENTS):
        found = MARKER_PATTERN.match(data, at)
        if found is None:
            return
        at = found.end()
        kind, end = data[at - 1], at + int.from_bytes(data[at : at + 2], "big")
        if kind in MARKERS_WITHOUT_LENGTH or end < at + 2 or end > len(data):
            return
        yield kind, data[at + 2 : end]
        if kind == SOS:
            return
        at = end


def parse_exif_orientation(exif: bytes) -> int | None:
    """The orientation in the first directory of EXIF, 0 if it has none; None if that is in any way unusual."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    try:
        [first] = struct.unpack_from(f"{order}L", exif, 4)
        [count] = struct.unpack_from(f"{order}H", exif, first)
        entries = [struct.unpack_from(f"{order}HHLHxx", exif, first + 2 + 12 * each) for each in range(count)]
    except struct.error:  # it ends too soon
        return None
    found = [entry for entry in entries if entry[0] == ExifTags.Base.Orientation]
    if not found:
        return 0
    _, kind, length, turn = found[0]
    return turn if len(found) == 1 and (kind, length) == (EXIF_SHORT_TYPE, 1) else None
