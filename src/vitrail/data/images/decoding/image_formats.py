"""Read image files of six formats, recognized by their first bytes, within limits. JPEG is decoded in jpeg.py."""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from math import ceil, inf
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from PIL import ExifTags, Image

from vitrail.base.errors import ConfigError, DataError, VitrailError, describe_error
from vitrail.base.files import suggest_sibling
from vitrail.data.photos import locate_example_photo

PLUGINS = {  # format → the Pillow module imported for it, and the function that opens a file; JPEG is in jpeg.py
    "PNG": ("PIL.PngImagePlugin", "PngImageFile"),
    "WebP": ("PIL.WebPImagePlugin", "WebPImageFile"),
    "GIF": ("PIL.GifImagePlugin", "GifImageFile"),
    "BMP": ("PIL.BmpImagePlugin", "BmpImageFile"),
    "TIFF": ("PIL.TiffImagePlugin", "TiffImageFile"),
}
PILLOW_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow's names of them
FORMATS = ("JPEG", *PLUGINS)
SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    # two of them are invalid but common
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+"), "TIFF"),
}
UNSUPPORTED_SIGNATURES = {  # recognized, but not supported
    b"%PDF": "a PDF file",
    b"%!PS": "a PostScript file",
    b"\x04%!PS": "a PostScript file",
    b"\xc5\xd0\xd3\xc6": "an EPS file",
    b"8BPS": "a Photoshop file",
    b"\0\0\1\0": "an icon (ICO)",
    b"\0\0\2\0": "a cursor (CUR)",
    **{b"P%d" % number: "a PPM, PGM or PBM file" for number in range(1, 8)},
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"\xffO\xffQ": "a JPEG 2000 image",
    b"\0\0\0\x0cJXL ": "a JPEG XL image",
    b"\xff\x0a": "a JPEG XL image",
    b"PK\3\4": "a zip file",
    b"\x1f\x8b": "a gzip file",
    b"\x1aE\xdf\xa3": "a video",
    b"\0\0\1\xba": "a video",
    b"\0\0\1\xb3": "a video",
}
MARKUP_SIGNATURES = {b"<!doctype html": "an HTML page", b"<html": "an HTML page", b"<svg": "an SVG drawing"}
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
CONVERSION_COMMANDS = {"an AVIF image": "magick IN.avif OUT.png", "a HEIC image": "heif-convert IN.heic OUT.png"}

MAX_PIXELS = 2**26  # of an image: 256 MB as RGB in Pillow, and as much again while it is converted or rotated
MAX_WEBP_PIXELS = 3 * 2**24  # its decoder holds five copies
MAX_RLE_BMP_PIXELS = 2**24  # of a run-length encoded BMP, which Pillow decodes in Python
MAX_SIDE = 2**20  # resizing takes 32 bytes per row or column
TIFF_COMPRESSIONS = (  # without rare ones, and without those that specify their own memory size
    *("raw", "packbits", "tiff_ccitt", "group3", "group4", "tiff_lzw", "jpeg"),
    *("tiff_adobe_deflate", "tiff_deflate", "zstd"),
)
TILE_WIDTH, TILE_LENGTH = 322, 323  # tags of TIFF
TIFF_BYTE_TYPES = (1, 2, 7)  # of tags: bytes, text and undefined; Pillow makes one object of any length from them,
TIFF_NUMBER_TAGS = (258, 273, 279, 320, 324, 325, 338, 339)  # but one per byte of strips, tiles, samples and palettes
BIG_TIFF = 43
MAX_TIFF_TABLE_BYTES = (
    2**20
)  # of all other tags: 131,072 strips or tiles, for each of which Pillow makes several objects
MAX_READS = 2**18  # of parts of a file (chunks, blocks, segments, entries), which Pillow keeps
MAX_EXIF_BYTES = 2**20  # in PNG and WebP; Pillow expands its tables twentyfold
MAX_TILE_COVERAGE = 8  # times that the tiles of a file may cover its image: once per channel


EXIF_TRANSPOSES = {  # EXIF orientation → what makes the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class ImageLimits:
    """The largest image that is read; a larger one is refused before it is decoded."""

    pixels: int | None = None  # None: depends on the format, so that no image takes more than about 1 GB
    bytes: int = 2**28  # of its file
    reduced_pixels: int | None = None  # of a baseline JPEG, which may be decoded at a reduced size; None: `pixels`
    formats: tuple[str, ...] = FORMATS

    def __post_init__(self) -> None:
        for name, value in (("pixels", self.pixels), ("bytes", self.bytes), ("reduced_pixels", self.reduced_pixels)):
            if value is not None and value < 1:
                raise ConfigError(f"the limit on {name} is {value}; expected 1 or more")


DEFAULT_LIMITS = ImageLimits()


class BoundedFile(BytesIO):
    """The bytes of an image, for a plugin that may read a limited number of parts."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(data)
        self.where, self.reads_left = where, float(MAX_READS)

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise DataError(
                f"{self.where} has too many chunks, blocks or segments; expected a usual file: save it again"
            )
        return super().read(size)


@runtime_checkable
class SeekableFile(Protocol):
    """A binary file; `seekable` is whether it can be rewound."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> Any: ...
    def seekable(self) -> bool: ...


@contextmanager
def wrap_image_errors(where: str) -> Generator[None]:
    """Turn every error raised inside into a one-line DataError that begins with `where`."""
    try:
        yield
    except VitrailError:
        raise
    except FileNotFoundError as error:
        hint = suggest_sibling(error.filename) if error.filename else ""
        raise DataError(f"{where} does not exist; expected an image{hint}") from None
    except IsADirectoryError:
        raise DataError(f"{where} is a folder; expected an image: pass its files one by one") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{where} is too large: {describe_error(error)}; expected fewer pixels") from None
    except MemoryError:
        raise DataError(f"{where} does not fit into memory; expected a smaller image") from None
    except Exception as error:  # on broken bytes Pillow's plugins raise anything
        raise DataError(
            f"{where} cannot be read: {describe_error(error)}; expected a complete and readable image"
        ) from None


@contextmanager
def prefix_errors_with_path(source: Any) -> Generator[None]:
    """If `source` is a path, every DataError raised inside begins with it."""
    try:
        yield
    except DataError as error:
        name = repr(str(source)) if isinstance(source, str | Path) else ""
        if str(error).startswith(name):
            raise
        raise DataError(f"{name}: {error}") from None


def read_image_file(path: str | Path, where: str, limits: ImageLimits) -> bytes:
    """The contents of a regular file within the limits; nothing else is opened, so reading never blocks."""
    with wrap_image_errors(where):
        status = os.stat(path)  # noqa: PTH116
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{where} is a pipe, a socket or a device; expected a file, or - for standard input")
        if status.st_size > limits.bytes:
            raise file_too_large_error(where, f"{status.st_size}", limits)
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(status.st_size)  # some files in /proc never end


def read_stream(file: Any, where: str, limits: ImageLimits) -> bytes:
    """The contents of a binary file from its beginning; a seekable file is rewound."""
    with wrap_image_errors(where):
        seekable = isinstance(file, SeekableFile) and file.seekable()
        if seekable:
            file.seek(0)
        data = bytes(file.read(limits.bytes + 1))
        if seekable:
            file.seek(0)
    return data


def read_encoded_bytes_and_name(source: Any, limits: ImageLimits) -> tuple[bytes | None, str]:
    """The encoded bytes of a path, bytes or a binary file, None for other sources; and the name in error messages."""
    if isinstance(source, str | Path):
        where = repr(str(source))
        data = read_image_file(locate_example_photo(source), where, limits)
    elif isinstance(source, bytes | bytearray | memoryview):
        data, where = bytes(source), "the given data"
    elif hasattr(source, "read"):  # files of any library; a Protocol would be slow for images in memory
        where = f"the file {getattr(source, 'name', '')!r}"  # BytesIO has no name
        data = read_stream(source, where, limits)
    else:
        return None, "the given image"
    if len(data) > limits.bytes:
        raise file_too_large_error(where, "more", limits)
    if not data:
        raise DataError(f"{where} is empty; expected an image, not zero bytes")
    return data, where


def open_with_plugin(data: bytes, where: str, limits: ImageLimits) -> Image.Image:
    """The image of any format but JPEG, with its header read and checked, not yet decoded.

    Pillow's Image.open is not used: it tries all plugins, and some of them start programs.
    """
    kind = detect_image_format(data)
    if kind is None or kind not in limits.formats:
        raise unsupported_format_error(data, where, limits)
    size = read_webp_size(data) if kind == "WebP" else None
    if size is not None:  # before its decoder allocates the canvas
        check_pixels(*size, where, limits, MAX_WEBP_PIXELS)
    if kind == "TIFF":
        check_tiff_tables(data, where)
    module, opener = PLUGINS[kind]
    file = BoundedFile(data, where)
    image: Any = getattr(import_module(module), opener)(file, "")  # imported when it is needed
    if kind == "BMP":
        file.reads_left = inf  # one per run of a compressed one, which has few pixels
    check_pixels(image.height, image.width, where, limits, get_pixel_limit(image, kind))
    if kind == "TIFF":
        check_tiff_compression_and_tiles(image, where, limits)
    covered = sum((right - left) * (bottom - top) for _, (left, top, right, bottom), *_ in image.tile)
    if covered > MAX_TILE_COVERAGE * image.width * image.height:
        raise DataError(f"{where} stores its pixels many times over; expected each once: save it again")
    return image


def detect_image_format(data: bytes) -> str | None:
    """The format of a file by its first bytes, not by its name; None if it is not supported."""
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    return next((kind for signature, kind in SIGNATURES.items() if data.startswith(signature)), None)


def unsupported_format_error(data: bytes, where: str, limits: ImageLimits) -> DataError:
    """The error for an unsupported file: what it is, by its first bytes, and how to convert it."""
    expected = f"{', '.join(limits.formats[:-1])} or {limits.formats[-1]}"
    readable = detect_image_format(data)
    kind = detect_unsupported_kind(data) if readable is None else f"a {readable} file"
    if kind is None:
        return DataError(f"{where} is not an image; expected {expected}")
    how = f"with '{CONVERSION_COMMANDS[kind]}'" if kind in CONVERSION_COMMANDS else "to PNG"
    return DataError(f"{where} is {kind}; expected {expected}: convert it, for instance {how}")


def detect_unsupported_kind(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        brands = data[8:64]
        if b"avif" in brands or b"avis" in brands:
            return "an AVIF image"
        return "a HEIC image" if brands[:4] in HEIC_BRANDS else "a video"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "a video"
    text = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"<?xml") and b"<svg" in text:
        return "an SVG drawing"
    signatures = {**UNSUPPORTED_SIGNATURES, **MARKUP_SIGNATURES}
    return next((kind for start, kind in signatures.items() if data.startswith(start) or text.startswith(start)), None)


def get_pixel_limit(image: Any, kind: str) -> int:
    """The default limit of any format but JPEG."""
    if kind == "BMP" and image.tile and image.tile[0][0] == "bmp_rle":
        return MAX_RLE_BMP_PIXELS
    return MAX_WEBP_PIXELS if kind == "WebP" else MAX_PIXELS


def read_webp_size(data: bytes) -> tuple[int, int] | None:
    """Rows and columns, from the header of a WebP file."""
    chunk = data[12:16]
    if chunk == b"VP8X":
        columns, rows = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return rows, columns
    if chunk == b"VP8 ":
        columns, rows = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        return rows, columns
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    return None


def check_pixels(rows: int, columns: int, where: str, limits: ImageLimits, format_limit: int = MAX_PIXELS) -> None:
    """Check the size against the user's limit or, by default, the limit of the format."""
    max_pixels = format_limit if limits.pixels is None else limits.pixels
    if rows * columns > max_pixels:
        hint = "if it is not a decompression bomb, raise the limit on pixels"
        raise DataError(f"{where} is {rows}×{columns} pixels; expected at most {max_pixels} pixels: {hint}")
    if max(rows, columns) > MAX_SIDE:
        raise DataError(f"{where} is {rows}×{columns} pixels; expected sides of at most {MAX_SIDE}: crop it first")


def read_exif_orientation(image: Image.Image) -> int:
    if len(image.info.get("exif", b"")) > MAX_EXIF_BYTES:
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except DataError:  # the EXIF of a PNG may follow its pixels, which exceed a limit
        raise
    except Exception:  # broken EXIF; the pixels may be intact
        return 1


def check_tiff_tables(data: bytes, where: str) -> None:
    """Check the size of the tables in the first directory, and in those it names for EXIF, before they are expanded."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2
    from PIL.TiffTags import TAGS_V2_GROUPS

    directory: Any = ImageFileDirectory_v2(data[: 16 if data[2] == BIG_TIFF else 8])
    file, starts, size = BoundedFile(data, where), [directory.next], 0
    for start in starts:
        file.seek(start)
        directory.load(file)
        for tag, found in directory._tagdata.items():  # not yet converted to numbers
            if directory.tagtype[tag] not in TIFF_BYTE_TYPES:
                size += len(found)
            elif tag in TIFF_NUMBER_TAGS:
                size += 8 * len(found)
        if size > MAX_TIFF_TABLE_BYTES:
            raise DataError(
                f"{where} has tables of {size} bytes; expected at most {MAX_TIFF_TABLE_BYTES}: use larger strips"
            )
        if len(starts) == 1:
            starts += [directory[tag] for tag in TAGS_V2_GROUPS if isinstance(directory.get(tag), int)]


def check_tiff_compression_and_tiles(image: Any, where: str, limits: ImageLimits) -> None:
    compression = image.info.get("compression")
    if compression not in TIFF_COMPRESSIONS:
        raise DataError(f"{where} is a TIFF file with compression {compression}; expected a common one: save it as PNG")
    width, height = image.tag_v2.get(TILE_WIDTH), image.tag_v2.get(TILE_LENGTH)
    if width and height:  # complete tiles are decoded, even if they exceed the image
        check_pixels(ceil(image.height / height) * height, ceil(image.width / width) * width, where, limits)


def file_too_large_error(where: str, count: str, limits: ImageLimits) -> DataError:
    return DataError(f"{where} has {count} bytes; expected at most {limits.bytes}: raise the limit on bytes")
