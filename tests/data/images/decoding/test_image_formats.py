"""Six formats, recognized by their first bytes and read by one plugin each; too expensive files are refused."""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import hostile_images as hostile
from support.encoded_images import encode_test_image

from vitrail.base.errors import DataError
from vitrail.data.images.datasets import estimate_decoded_bytes
from vitrail.data.images.decoding import image_formats, jpeg, rgb_image
from vitrail.data.images.decoding.crops import CropBox, decode_crop
from vitrail.data.images.decoding.image_formats import ImageLimits
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.formats.class_folders import FileDataset
from vitrail.data.images.preprocessing import Preprocessing

PLAIN = Preprocessing(image_size=32)
COMMENT = hostile.jpeg_segment(0xFE, b"")
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
READ: dict[str, Callable[[Any], Any]] = {
    "open_image": open_image,
    "full size": lambda source: decode_for_model(source, PLAIN),
    "reduced": lambda source: decode_for_model(source, PLAIN, reduce_jpeg=True),
    "crop": lambda source: decode_crop(source, lambda rows, columns: CropBox(0, 0, rows, columns), (8, 8)),
}
OTHERS = {
    "a PDF file": b"%PDF-1.7\n",
    "a PostScript file": POSTSCRIPT,
    "an EPS file": b"\xc5\xd0\xd3\xc6" + bytes(28),
    "a Photoshop file": b"8BPS\0\1",
    "an icon": b"\0\0\1\0\1\0",
    "a PPM, PGM or PBM file": b"P6 1 1 255\n\0\0\0",
    "an SVG drawing": b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>",
    "an HTML page": b"\n<!DOCTYPE html><html>",
    "a zip file": b"PK\3\4",
    "a video": b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41",
    "a JPEG 2000 image": b"\0\0\0\x0cjP  \r\n\x87\n",
}


def refused(source: Any) -> str:
    """The error message, the same line from every function."""
    messages = set[str]()
    for name, read in READ.items():
        with pytest.raises(DataError) as caught:
            read(source)
        assert "; expected " in str(caught.value), name
        messages.add(str(caught.value))
    assert len(messages) == 1, messages
    return messages.pop()


@contextmanager
def seconds(most: int) -> Generator[None]:
    """Fail if the code inside blocks."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(most)  # wall time, since code that blocks takes no CPU time
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", OTHERS)
def test_unsupported_files_are_named_and_refused(kind: str) -> None:
    assert f"the given data is {kind}" in refused(OTHERS[kind])
    assert "expected JPEG, PNG, WebP, GIF, BMP or TIFF: convert it" in refused(OTHERS[kind])


@pytest.mark.parametrize(
    ("brand", "message"),
    [
        (
            b"avif",
            "is an AVIF image; expected JPEG, PNG, WebP, GIF, BMP or TIFF: convert it, for instance with 'magick",
        ),
        (b"mif1avif", "is an AVIF image"),
        (b"heic", "is a HEIC image; expected JPEG, PNG, WebP, GIF, BMP or TIFF: convert it, for instance with 'heif-"),
        (b"mif1heic", "is a HEIC image"),
    ],
)
def test_avif_and_heic_errors_suggest_a_conversion(brand: bytes, message: str) -> None:
    assert message in refused(b"\0\0\0\x1cftyp" + brand + bytes(12))


def test_only_the_plugins_of_the_six_formats_are_imported(tmp_path: Path) -> None:
    for number, kind in enumerate(("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")):
        (tmp_path / f"{number}.jpg").write_bytes(encode_test_image(kind, 8, 8))
    for number, data in enumerate(OTHERS.values()):
        (tmp_path / f"other{number}.jpg").write_bytes(data)
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    script = """
import sys
from pathlib import Path
from vitrail.data.images.decoding.crops import CropBox, decode_crop
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.base.errors import DataError

def plugins():
    return sorted(name[4:-11] for name in sys.modules if name.startswith("PIL.") and name.endswith("ImagePlugin"))

def view(path):
    return decode_for_model(path, Preprocessing(image_size=8))

view(sys.argv[1] + "/0.jpg")
print(*plugins())
for path in sorted(Path(sys.argv[1]).glob("*.jpg")):
    crop = lambda path: decode_crop(path, lambda rows, columns: CropBox(0, 0, rows, columns), (8, 8))
    for read in (open_image, view, crop):
        try:
            read(path)
        except DataError:
            assert path.name.startswith("other")
print(*plugins())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, last = done.stdout.splitlines()
    assert set(first.split()) <= {"Jpeg"}  # none at all with simplejpeg
    assert set(last.split()) <= {"Jpeg", "Png", "WebP", "Gif", "Bmp", "Tiff", "Mpo"}
    assert not (tmp_path / "started").exists()


def test_undecoded_pillow_image_never_starts_a_program(tmp_path: Path) -> None:
    path = tmp_path / "a.eps"
    path.write_bytes(POSTSCRIPT)
    with (
        Image.open(path) as image,
        pytest.raises(DataError, match="is an undecoded EPS file; expected one of"),
    ):
        open_image(image)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a pipe, a socket or a device"),
    "socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "is a pipe, a socket or a device"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "is a pipe, a socket or a device"),
    "device": (lambda path: path.symlink_to("/dev/null"), "is a pipe, a socket or a device"),
    "folder": (Path.mkdir, "is a folder"),
    "loop": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    "missing": (str, "does not exist"),
    "below a file": (lambda path: path.parent.rmdir() or path.parent.write_bytes(b""), "cannot be read: Not a dir"),
}


@pytest.mark.filterwarnings("ignore:unclosed")
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make, message = SPECIAL[kind]
    place = Path("in") / "it.jpg"
    place.parent.mkdir()
    make(place)
    if link:
        Path("link.jpg").symlink_to(place)
        place = Path("link.jpg")
    with seconds(200):
        assert message in refused(place)
        assert message in refused(str(place))
        assert estimate_decoded_bytes(FileDataset([place], [0], ["a"])) == 0


def test_growing_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    growing = Path("/proc/self/pagemap")  # reports no size and never ends
    if not growing.exists():
        pytest.skip("needs /proc")
    with seconds(200), pytest.raises(DataError, match="expected"):
        decode_for_model(growing, PLAIN, ImageLimits(bytes=2**16))
    path = tmp_path / "a.png"
    path.write_bytes(encode_test_image("PNG", 8, 8))
    with pytest.raises(DataError, match="expected at most 9: raise the limit on bytes"):
        decode_for_model(path, PLAIN, ImageLimits(bytes=9))


COSTLY: dict[str, tuple[Callable[[], bytes], str]] = {
    "progressive": (lambda: hostile.jpeg(8200, 8200, frame=0xC2, data=b""), "at most 67108864 pixels"),
    "arithmetic": (lambda: hostile.jpeg(8200, 8200, frame=0xC9, data=b""), "at most 67108864 pixels"),
    "a scan for each channel": (
        lambda: hostile.jpeg(8200, 8200, factors=(0x11,) * 3, data=b"").replace(
            b"\xff\xda\0\x0c\3\1\0\2\0\3\0", b"\xff\xda\0\x08\1\1\0"
        ),
        "at most 67108864 pixels",
    ),
    "lost between markers": (
        lambda: hostile.jpeg(8200, 8200, before=COMMENT + b"junk", data=b""),
        "at most 67108864 pixels",
    ),
    "scans": (lambda: hostile.jpeg(4096, 4096, frame=0xC2, scans=300), "300 scans; expected at most 256"),
    "PNG": (lambda: hostile.png(8193, 8192, bits=1, color=0), "at most 67108864 pixels"),
    "thin": (lambda: hostile.png(1, 2**20 + 1, color=0, bits=1), "expected sides of at most 1048576"),
    "WebP": (lambda: b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x1f\0\xff\x1f\0", "at most 50331648 pixels"),
    "BMP in runs": (lambda: hostile.bmp(4097, 4097, compression=1, data=b"\0\2\xff\xff"), "at most 16777216 pixels"),
    "canvas of a GIF": (lambda: hostile.gif(1, 1, [hostile.gif_frame(1, 1, 9000, 9000)]), "at most 67108864 pixels"),
    "tiles wider than the image": (
        lambda: hostile.blank_tiff(16, 16, bits=(8,), tags={322: (4, [60000]), 323: (4, [16384])}),
        "is 16384×60000 pixels",
    ),
    "strips of a pixel": (
        lambda: hostile.blank_tiff(
            140_000, 1, bits=(8,), tags={259: (3, [1]), 278: (4, [1]), **dict.fromkeys((273, 279), (4, [8] * 140_000))}
        ),
        "bytes; expected at most 1048576: use larger strips",
    ),
    "a strip table for a single pixel": (
        lambda: hostile.blank_tiff(1, 1, bits=(8,), tags={259: (3, [1]), 273: (3, [8] * 600_000)}),
        "has tables of",
    ),
    "a strip table of bytes": (
        lambda: hostile.blank_tiff(16, 16, bits=(8,), tags={259: (3, [1]), 273: (1, [8] * 200_000), 278: (4, [1])}),
        "has tables of",
    ),
    "a table that is no strip table": (
        lambda: hostile.blank_tiff(8, 8, tags={274: (3, [1] * 600_000)}),
        "has tables of",
    ),
    "a table in the EXIF of a TIFF": (
        lambda: hostile.tiff(
            {256: (4, [8]), 257: (4, [8]), 34665: (4, [8])},
            struct.pack("<HHHIII", 1, 7, 3, 600_000, 8, 0) + bytes(2**21),
        ),
        "has tables of",
    ),
    "EXIF in many segments": (
        lambda: hostile.jpeg(8, 8, before=hostile.jpeg_segment(0xE1, b"Exif\0\0II") * 17),
        "has 17 EXIF segments; expected at most 16",
    ),
    "strips on top of each other": (
        lambda: hostile.blank_tiff(70, 70, bits=(8,), tags={259: (3, [1]), 273: (4, [8] * 99), 278: (4, [69])}),
        "stores its pixels many times over",
    ),
    "a compression that is not listed": (
        lambda: hostile.blank_tiff(8, 8, tags={259: (3, [34925])}),
        "is a TIFF file with compression lzma",
    ),
}


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", COSTLY)
def test_expensive_images_are_refused_before_decoding(kind: str) -> None:
    make, message = COSTLY[kind]
    assert message in refused(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: hostile.png(8, 8, before=hostile.png_chunk(b"vpAg", b"") * 200),
        lambda: hostile.png(8, 8)[:-12] + hostile.png_chunk(b"vpAg", b"") * 200,
        lambda: hostile.gif(1, 1, [b"!\xfe" + b"\1a" * 200 + b"\0", hostile.gif_frame(1, 1)]),
        lambda: hostile.jpeg(8, 8, before=COMMENT * 200),
        lambda: hostile.tiff({number: (3, [1]) for number in range(200)}),
    ],
    ids=["PNG", "PNG after its pixels", "GIF", "JPEG", "TIFF"],
)
def test_many_small_parts_are_refused(make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow keeps something for each chunk, block, segment or tag."""
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    monkeypatch.setattr(image_formats, "MAX_READS", 150)
    assert "has too many chunks, blocks or segments" in refused(make())


def test_large_exif_is_not_read() -> None:
    """Pillow would make objects of all numbers in it, so its orientation does not count."""
    exif = struct.pack("<4sIHHHIII", b"II*\0", 8, 1, 274, 3, 1, 6, 0)
    for padding, size in ((0, (8, 16)), (2**20, (16, 8))):
        data = hostile.png(8, 16, before=hostile.png_chunk(b"eXIf", exif + bytes(padding)))
        assert open_image(data).size == size


def test_given_limit_replaces_the_limit_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_formats, "MAX_PIXELS", 50)
    data = encode_test_image("PNG", 8, 8)
    assert "expected at most 50 pixels" in refused(data)
    assert decode_for_model(data, PLAIN, ImageLimits(pixels=64)).shape == (32, 32, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(data).size == (8, 8)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("fill", [1, 2, 9])
def test_jpeg_fill_bytes_are_skipped(fill: int) -> None:
    plain = encode_test_image("JPEG", 40, 60)
    padded = plain[:2] + b"\xff" * fill + plain[2:20] + b"\xff" * fill + plain[20:]
    for name, read in READ.items():
        assert np.array_equal(np.asarray(read(padded)), np.asarray(read(plain))), name
    assert jpeg.find_jpeg_orientation(padded) == 1
    assert not jpeg.needs_full_image_in_memory(padded)


@pytest.mark.usefixtures("decoder")
def test_segment_that_ends_at_the_last_byte_is_valid() -> None:
    """Without support for fill bytes, one is taken for a marker and the next ones for a length up to the last byte."""
    plain = encode_test_image("JPEG", 40, 60)
    padded = (plain[:2] + b"\xff" + COMMENT + plain[2:]).ljust(4 + 0xFE00, b"\0") + b"\xff"
    for name, read in READ.items():
        assert np.array_equal(np.asarray(read(padded)), np.asarray(read(plain))), name


def test_baseline_jpeg_in_one_scan_is_decoded_row_by_row() -> None:
    assert not jpeg.needs_full_image_in_memory(encode_test_image("JPEG", 8, 8))
    assert not jpeg.needs_full_image_in_memory(encode_test_image("JPEG", 8, 8, mode="CMYK"))
    assert jpeg.needs_full_image_in_memory(encode_test_image("JPEG", 8, 8, progressive=True))
    assert jpeg.needs_full_image_in_memory(b"\xff\xd8\xff")


def in_one_piece(image: Image.Image) -> Image.Image:
    """Transparency and 16 bits by their definition, on the complete image at once."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


@pytest.mark.parametrize("strip", [1, 100, 2**20])
def test_conversion_in_strips_is_bit_identical(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rgb_image, "STRIP_PIXELS", strip)
    random = np.random.default_rng(0)
    rgba = Image.fromarray(random.integers(0, 256, (23, 31, 4), dtype=np.uint8))
    table = bytes(random.integers(0, 256, 16, dtype=np.uint8))
    wide = random.integers(0, 65536, (23, 31))
    color = rgba.convert("RGB")
    for image in (
        rgba,
        rgba.convert("LA"),
        Image.open(hostile.encode_to_buffer(color.quantize(16), "PNG", transparency=3)),
        Image.open(hostile.encode_to_buffer(color.quantize(16), "PNG", transparency=table)),
        Image.open(hostile.encode_to_buffer(color, "PNG", transparency=(1, 2, 3))),
        Image.fromarray(wide.astype(np.uint16)),
        Image.fromarray(wide.astype(">u2")),
        Image.fromarray(wide.astype(np.int32)),
    ):
        assert np.array_equal(np.asarray(open_image(image)), np.asarray(in_one_piece(image))), image
