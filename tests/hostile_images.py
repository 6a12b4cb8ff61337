"""Image files built by hand, byte by byte: small ones that are large, deep, long or wrong when they are decoded."""

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from PIL import Image

ONE_PIXEL = b"\2\2\x44\1\0"  # in GIF's LZW


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    rows: int,
    columns: int,
    *,
    bits: int = 8,
    colour: int = 2,
    before: bytes = b"",
    fill: bytes = b"\0",
    interlace: int = 0,
) -> bytes:
    """All pixels of one value: a thousandth of their size. Colour: 0 grey, 2 RGB, 3 palette, 4 and 6 with alpha."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    packed, row = zlib.compressobj(9), (columns * channels * bits + 7) // 8
    line, parts = b"\0" + fill * row, list[bytes]()
    at_once = max(1, 2**20 // len(line))
    for top in range(0, rows, at_once):
        parts.append(packed.compress(line * min(at_once, rows - top)))
    parts.append(packed.flush())
    header = struct.pack(">IIBBBBB", columns, rows, bits, colour, 0, 0, interlace)
    palette = chunk(b"PLTE", bytes(range(6))) if colour == 3 else b""
    body = chunk(b"IHDR", header) + palette + before + chunk(b"IDAT", b"".join(parts)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def segment(kind: int, data: bytes) -> bytes:
    return bytes((0xFF, kind)) + (len(data) + 2).to_bytes(2, "big") + data


def table(number: int, codes: Sequence[int]) -> bytes:
    """A Huffman table in which each of these values has a code of its own; the first takes one bit."""
    lengths = [1] * 1 + [0] * 15
    for place in range(1, len(codes)):
        lengths[place] = 1
    return segment(0xC4, bytes((number, *lengths, *codes)))


def jpeg(
    rows: int,
    columns: int,
    *,
    frame: int = 0xC0,
    factors: Sequence[int] = (0x11,),
    scans: int = 1,
    data: bytes | None = None,
    before: bytes = b"",
) -> bytes:
    """A JPEG of grey blocks, two bits each; progressive (0xC2) with so many scans that have next to nothing in them."""
    parts = [(1 + place, factor, 0) for place, factor in enumerate(factors)]
    header = struct.pack(">BHHB", 8, rows, columns, len(parts)) + bytes(each for part in parts for each in part)
    start = b"\xff\xd8" + before + segment(0xDB, b"\0" + b"\1" * 64) + segment(frame, header)
    across, down = max(f >> 4 for f in factors), max(f & 15 for f in factors)
    units = -(-rows // (8 * down)) * -(-columns // (8 * across))
    blocks = units * sum((f >> 4) * (f & 15) for f in factors) if len(factors) > 1 else units
    listed = bytes((len(parts), *(each for part in parts for each in (part[0], 0))))
    if frame != 0xC2:
        coded = bytes(-(-2 * blocks // 8)) if data is None else data
        return start + table(0, [0]) + table(0x10, [0]) + segment(0xDA, listed + b"\0\x3f\0") + coded + b"\xff\xd9"
    first = segment(0xDA, listed + b"\0\0\0") + (bytes(-(-blocks // 8)) if data is None else data)
    long_run = b"\0\0\0"  # the first code: no more than 32767 blocks to come
    runs = b"".join(long_run[:2] for _ in range(-(-(-(-rows // 8) * -(-columns // 8)) // 16384)))
    more = segment(0xDA, bytes((1, 1, 0, 1, 1, 0))) + runs
    return start + table(0, [0]) + table(0x10, [0xE0]) + first + more * (scans - 1) + b"\xff\xd9"


def tiff(tags: dict[int, tuple[int, Sequence[int]]], data: bytes = b"", order: str = "<", following: int = 0) -> bytes:
    """One directory of these tags (number → type, values; 3 is a short, 4 a long), and `data` from byte 8 on."""
    size = {1: "B", 2: "B", 3: "H", 4: "I", 5: "I", 16: "Q"}
    start = 8 + len(data) + len(data) % 2
    entries, extra = list[bytes](), b""
    outside = start + 2 + 12 * len(tags) + 4
    for number, (kind, values) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}{size[kind]}", *values)
        if len(packed) <= 4:
            value = packed.ljust(4, b"\0")
        else:
            value = struct.pack(f"{order}I", outside + len(extra))
            extra += packed
        entries.append(struct.pack(f"{order}HHI", number, kind, len(values)) + value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", start)
    listed = struct.pack(f"{order}H", len(tags)) + b"".join(entries) + struct.pack(f"{order}I", following)
    return head + data.ljust(start - 8, b"\0") + listed + extra


def tiff_of(rows: int, columns: int, *, bits: Sequence[int] = (8, 8, 8), **changes: Any) -> bytes:
    """Deflated, all pixels zero, in one strip."""
    row, packed = bytes(-(-columns * sum(bits) // 8)), zlib.compressobj(9)
    at_once = max(1, 2**20 // max(1, len(row)))
    parts = [packed.compress(row * min(at_once, rows - top)) for top in range(0, rows, at_once)]
    data = b"".join(parts) + packed.flush()
    photometric = {1: 1, 3: 2, 4: 5 if changes.pop("cmyk", False) else 2}[len(bits)]
    tags: dict[int, tuple[int, Sequence[int]]] = {
        256: (4, [columns]),
        257: (4, [rows]),
        258: (3, bits),
        259: (3, [8]),
        262: (3, [photometric]),
        273: (4, [8]),
        277: (3, [len(bits)]),
        278: (4, [rows]),
        279: (4, [len(data)]),
    }
    if len(bits) == 4 and photometric == 2:
        tags[338] = (3, [2])
    return tiff(tags | changes.pop("tags", {}), data, **changes)


def bmp(rows: int, columns: int, *, bits: int = 8, compression: int = 0, data: bytes = b"", colours: int = 2) -> bytes:
    palette = bytes(4 * colours) if bits <= 8 else b""
    info = struct.pack("<IiiHHIIiiII", 40, columns, rows, 1, bits, compression, len(data), 0, 0, colours, 0)
    start = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + palette + data


def gif(rows: int, columns: int, frames: Iterable[bytes] = (), colours: int = 2) -> bytes:
    """A canvas with these frames on it, each as `gif_frame` makes it."""
    head = b"GIF89a" + struct.pack("<HHBBB", columns, rows, 0x80, 0, 0) + bytes(3 * colours)
    return head + b"".join(frames) + b";"


def gif_frame(rows: int, columns: int, left: int = 0, top: int = 0, data: bytes = ONE_PIXEL) -> bytes:
    return b"," + struct.pack("<HHHHB", left, top, columns, rows, 0) + data


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
