"""Image files built byte by byte: small files that are large, expensive or invalid when they are decoded."""

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from PIL import Image

ONE_PIXEL = b"\2\2\x44\1\0"  # in GIF's LZW


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    rows: int,
    columns: int,
    *,
    bits: int = 8,
    color: int = 2,
    before: bytes = b"",
    fill: bytes = b"\0",
    interlace: int = 0,
) -> bytes:
    """A PNG of one color, a thousandth of its pixels. `color`: 0 gray, 2 RGB, 3 palette, 4 and 6 with alpha."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    packed, row = zlib.compressobj(9), (columns * channels * bits + 7) // 8
    line, parts = b"\0" + fill * row, list[bytes]()
    at_once = max(1, 2**20 // len(line))
    for top in range(0, rows, at_once):
        parts.append(packed.compress(line * min(at_once, rows - top)))
    parts.append(packed.flush())
    header = struct.pack(">IIBBBBB", columns, rows, bits, color, 0, 0, interlace)
    palette = png_chunk(b"PLTE", bytes(range(6))) if color == 3 else b""
    body = png_chunk(b"IHDR", header) + palette + before + png_chunk(b"IDAT", b"".join(parts)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def jpeg_segment(kind: int, data: bytes) -> bytes:
    return bytes((0xFF, kind)) + (len(data) + 2).to_bytes(2, "big") + data


def huffman_table(number: int, codes: Sequence[int]) -> bytes:
    """A Huffman table with one code per value; the first code has one bit."""
    lengths = [1] * 1 + [0] * 15
    for place in range(1, len(codes)):
        lengths[place] = 1
    return jpeg_segment(0xC4, bytes((number, *lengths, *codes)))


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
    """A JPEG of gray blocks of two bits each; progressive (0xC2) ones have `scans` almost empty scans."""
    parts = [(1 + place, factor, 0) for place, factor in enumerate(factors)]
    header = struct.pack(">BHHB", 8, rows, columns, len(parts)) + bytes(each for part in parts for each in part)
    start = b"\xff\xd8" + before + jpeg_segment(0xDB, b"\0" + b"\1" * 64) + jpeg_segment(frame, header)
    across, down = max(1, *(f >> 4 for f in factors)), max(1, *(f & 15 for f in factors))
    units = -(-rows // (8 * down)) * -(-columns // (8 * across))
    blocks = units * sum((f >> 4) * (f & 15) for f in factors) if len(factors) > 1 else units
    listed = bytes((len(parts), *(each for part in parts for each in (part[0], 0))))
    if frame != 0xC2:
        coded = bytes(-(-2 * blocks // 8)) if data is None else data
        return (
            start
            + huffman_table(0, [0])
            + huffman_table(0x10, [0])
            + jpeg_segment(0xDA, listed + b"\0\x3f\0")
            + coded
            + b"\xff\xd9"
        )
    first = jpeg_segment(0xDA, listed + b"\0\0\0") + (bytes(-(-blocks // 8)) if data is None else data)
    long_run = b"\0\0\0"  # the first code: a run of at most 32767 blocks
    runs = b"".join(long_run[:2] for _ in range(-(-(-(-rows // 8) * -(-columns // 8)) // 16384)))
    more = jpeg_segment(0xDA, bytes((1, 1, 0, 1, 1, 0))) + runs
    return start + huffman_table(0, [0]) + huffman_table(0x10, [0xE0]) + first + more * (scans - 1) + b"\xff\xd9"


def tiff(tags: dict[int, tuple[int, Sequence[int]]], data: bytes = b"", order: str = "<", following: int = 0) -> bytes:
    """A TIFF with one directory of these tags (number → type, values; 3 is a short, 4 a long) and `data` at byte 8."""
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


def blank_tiff(rows: int, columns: int, *, bits: Sequence[int] = (8, 8, 8), **changes: Any) -> bytes:
    """A deflated TIFF of zeros in one strip."""
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


def bmp(rows: int, columns: int, *, bits: int = 8, compression: int = 0, data: bytes = b"", colors: int = 2) -> bytes:
    palette = bytes(4 * colors) if bits <= 8 else b""
    info = struct.pack("<IiiHHIIiiII", 40, columns, rows, 1, bits, compression, len(data), 0, 0, colors, 0)
    start = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + palette + data


def gif(rows: int, columns: int, frames: Iterable[bytes] = (), colors: int = 2) -> bytes:
    """A GIF with these frames, made by `gif_frame`."""
    head = b"GIF89a" + struct.pack("<HHBBB", columns, rows, 0x80, 0, 0) + bytes(3 * colors)
    return head + b"".join(frames) + b";"


def gif_frame(rows: int, columns: int, left: int = 0, top: int = 0, data: bytes = ONE_PIXEL) -> bytes:
    return b"," + struct.pack("<HHHHB", left, top, columns, rows, 0) + data


def encode_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    return encode_to_buffer(image, kind, **options).getvalue()


def encode_to_buffer(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file


EDGE_SIDES = (0, 1, 2, 7, 8, 9, 31, 100, 255, 256, 1000, 65535, 2**20, 2**31 - 1)
EDGE_NUMBERS = (0, 1, 2, 3, 4, 8, 16, 32, 255, 256, 65535, 65536, 2**31 - 1, 2**32 - 1)


def random_bytes(draw: Random, max_length: int = 200) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 2, draw.randrange(max_length + 1))))


def random_jpeg(draw: Random) -> bytes:
    """Random segments: fill bytes, junk, wrong lengths, every kind of frame, and scans of any channels."""
    segments = list[bytes]()
    for _ in range(draw.randrange(6)):
        kind = draw.choice((*range(0xC0, 0x100), 0x01, 0x00, 0xE1, 0xE1, 0xE2))
        start = draw.choice(
            (b"", b"Exif\0\0", b"Exif\0\0II*\0\x08\0\0\0", b"MPF\0II*\0\x08\0\0\0", b"Adobe", b"JFIF\0")
        )
        each = b"\xff" * draw.choice((0, 0, 1, 5)) + jpeg_segment(kind, start + random_bytes(draw))
        if draw.random() < 0.2:
            each = each[:2] + draw.randrange(65536).to_bytes(2, "big") + each[4:]
        segments.append(each + draw.choice((b"", b"", b"", b"\0", b"junk")))
    factors = [draw.choice((0x11, 0x21, 0x22, 0x44, 0x41, 0x00, 0xF1)) for _ in range(draw.choice((1, 3, 3, 4, 2)))]
    return jpeg(
        min(draw.choice(EDGE_SIDES), 65535),
        min(draw.choice(EDGE_SIDES[:11]), 65535),
        frame=draw.choice((0xC0, 0xC1, 0xC2, 0xC2, 0xC3, 0xC9, 0xCA, 0xDE)),
        factors=factors,
        scans=draw.choice((1, 2, 50)),
        data=random_bytes(draw, 2000),
        before=b"".join(segments),
    )


def random_png(draw: Random) -> bytes:
    header = struct.pack(
        ">IIBBBBB",
        *(draw.choice(EDGE_SIDES) for _ in range(2)),
        draw.choice((1, 2, 4, 8, 16, 3, 32)),
        draw.choice((0, 2, 3, 4, 6, 5)),
        *(0, 0),
        draw.choice((0, 1)),
    )
    kinds = (
        b"PLTE",
        b"tRNS",
        b"IDAT",
        b"IDAT",
        b"iCCP",
        b"zTXt",
        b"iTXt",
        b"eXIf",
        b"acTL",
        b"fcTL",
        b"fdAT",
        b"gAMA",
        b"pHYs",
    )
    chunks = list[bytes]()
    for _ in range(draw.randrange(8)):
        packed = zlib.compress(bytes(draw.choice((0, 10, 10**5))))
        kind, data = draw.choice(kinds), draw.choice((b"", random_bytes(draw), packed, b"a\0\0" + packed))
        each = png_chunk(kind, data)
        if draw.random() < 0.2:
            each = struct.pack(">I", draw.choice(EDGE_NUMBERS)) + each[4:]
        chunks.append(each)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + b"".join(chunks) + png_chunk(b"IEND", b"")


def random_tiff(draw: Random) -> bytes:
    """An ordinary TIFF with some tags added or changed to other types, counts and values."""
    changed = dict[int, tuple[int, Sequence[int]]]()
    numbers = (
        256,
        257,
        258,
        259,
        262,
        266,
        273,
        274,
        277,
        278,
        279,
        284,
        320,
        322,
        323,
        324,
        325,
        338,
        339,
        530,
        700,
        34665,
    )
    for _ in range(draw.randrange(5)):
        kind = draw.choice((1, 3, 3, 4, 4, 5))
        values = [draw.choice(EDGE_NUMBERS) for _ in range(draw.choice((1, 1, 1, 2, 3, 4, 300)))]
        changed[draw.choice(numbers)] = (
            kind,
            [value % (256 if kind == 1 else 2 ** (8 * (2 if kind == 3 else 4))) for value in values],
        )
    bits = draw.choice(((8,), (1,), (16,), (32,), (8, 8, 8), (16, 16, 16), (8, 8, 8, 8)))
    rows, columns = draw.randrange(1, 60), draw.randrange(1, 60)
    order = draw.choice("<>")
    return blank_tiff(
        rows, columns, bits=bits, tags=changed, order=order, following=draw.choice((0, 8, 100, 2**32 - 1))
    )


def random_bmp(draw: Random) -> bytes:
    data = b"".join(
        draw.choice((b"\0\0", b"\0\1", b"\0\2\xff\xff", b"\0\5", b"\xff\1", random_bytes(draw, 20))) for _ in range(50)
    )
    sides = [min(draw.choice(EDGE_SIDES), 2**31 - 1) * draw.choice((1, 1, -1)) for _ in range(2)]
    bits, colors = draw.choice((1, 2, 4, 8, 16, 24, 32, 9)), draw.choice((0, 1, 2, 255, 256, 70000))
    return bmp(*sides, bits=bits, compression=draw.randrange(8), data=data, colors=colors)


def random_gif(draw: Random) -> bytes:
    frames = list[bytes]()
    for _ in range(draw.randrange(4)):
        sides = [min(draw.choice(EDGE_SIDES), 65535) if draw.random() < 0.1 else draw.randrange(300) for _ in range(4)]
        data = draw.choice(
            (ONE_PIXEL, bytes((draw.randrange(14),)) + b"\x20" + draw.randbytes(32) + b"\0", random_bytes(draw))
        )
        extension = b"!" + draw.choice(
            (b"\xf9\4\1\0\0\0\0", b"\xff\x0bNETSCAPE2.0\3\1\0\0\0", b"\xfe" + random_bytes(draw))
        )
        frames.append(draw.choice((b"", extension)) + gif_frame(*sides, data=data))
    return gif(draw.randrange(300), draw.randrange(300), frames, draw.choice((0, 1, 2, 256)))


def random_webp(draw: Random) -> bytes:
    canvas = b"".join((draw.choice(EDGE_SIDES) % 2**24).to_bytes(3, "little") for _ in range(2))
    chunks = [b"VP8X\x0a\0\0\0" + bytes((draw.randrange(256), 0, 0, 0)) + canvas] if draw.random() < 0.7 else []
    for _ in range(draw.randrange(5)):
        data = draw.choice(
            (random_bytes(draw), b"\x2f" + random_bytes(draw), b"\x10\0\0\x9d\1\x2a\x10\0\x10\0" + random_bytes(draw))
        )
        size = draw.choice(EDGE_NUMBERS) if draw.random() < 0.2 else len(data)
        chunks.append(
            draw.choice((b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF", b"EXIF", b"ICCP"))
            + struct.pack("<I", size)
            + data
        )
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", draw.choice((len(body), len(body), draw.choice(EDGE_NUMBERS)))) + body


def random_damaged_image(draw: Random) -> bytes:
    """A valid file of any format with some bytes changed, removed, repeated or truncated."""
    image = Image.frombytes("RGB", (20, 30), draw.randbytes(1800)).resize((40, 60))
    kind, options = draw.choice(VALID_IMAGES)
    data = bytearray(
        encode_image(
            image.convert(options.get("mode", "RGB")), kind, **{k: v for k, v in options.items() if k != "mode"}
        )
    )
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data))
        way = draw.randrange(5)
        if way < 2:
            data[at] = draw.choice((0, 1, 255, draw.randrange(256)))
        elif way == 2:
            data[at : at + 4] = draw.choice(EDGE_NUMBERS).to_bytes(4, draw.choice(("big", "little")))
        elif way == 3:
            data[at:at] = data[at : at + draw.randrange(50)]
        else:
            del data[at : at + draw.randrange(1, 20)]
        data = data or bytearray(b"\0")
    return bytes(data)


VALID_IMAGES: list[tuple[str, dict[str, Any]]] = [
    *(("JPEG", options) for options in ({}, {"progressive": True}, {"mode": "CMYK"}, {"mode": "L"})),
    *(("PNG", {"mode": mode}) for mode in ("RGB", "RGBA", "P", "1", "LA")),
    *(("GIF", {"mode": "P"}), ("BMP", {}), ("BMP", {"mode": "P"}), ("WEBP", {}), ("WEBP", {"lossless": True})),
    *(("TIFF", {"compression": each}) for each in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")),
    ("TIFF", {"mode": "1", "compression": "group4"}),
]
GENERATORS = (random_jpeg, random_png, random_tiff, random_bmp, random_gif, random_webp, random_damaged_image)
