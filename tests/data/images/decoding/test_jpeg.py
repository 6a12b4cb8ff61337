"""simplejpeg is used only for JPEGs where it is bit-identical to Pillow and the orientation is certain."""

import io
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.data.images.decoding import jpeg
from vitrail.data.images.decoding.image_formats import read_exif_orientation

EXIF = {
    "little": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0%c\0\0\0\0\0\0\0",
    "big": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0%c\0\0\0\0\0\0",
}
ANOTHER = EXIF["big"].replace(b"\x01\x12", b"\x01\x13")  # not the orientation
XMP = b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="6"/>'


def encoded(mode: str = "RGB", rows: int = 40, columns: int = 60, **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def noted(*segments: bytes) -> bytes:
    """A JPEG with these APP1 segments at its start."""
    app1 = b"".join(b"\xff\xe1" + (len(each) + 2).to_bytes(2, "big") + each for each in segments)
    data = encoded()
    return data[:2] + app1 + data[2:]


def by_pillow(data: bytes) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken EXIF
        return read_exif_orientation(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("orientation", range(1, 10))
@pytest.mark.parametrize("order", EXIF)
def test_orientation_in_both_byte_orders(order: str, orientation: int) -> None:
    data = noted(EXIF[order] % orientation)
    assert jpeg.find_jpeg_orientation(data) == by_pillow(data) == orientation


@pytest.mark.parametrize(
    ("segments", "orientation"),
    [
        ((), 1),
        ((b"http://ns.adobe.com/xap/1.0/\0<nothing/>",), 1),
        ((ANOTHER % 6,), 1),
        ((XMP, EXIF["big"] % 3), 3),  # XMP is not read
        ((EXIF["big"] % 8, XMP), 8),
    ],
)
def test_orientation_of_usual_files(segments: tuple[bytes, ...], orientation: int) -> None:
    assert jpeg.find_jpeg_orientation(noted(*segments)) == by_pillow(noted(*segments)) == orientation


@pytest.mark.parametrize(
    "segments",
    [
        (b"Exif\0\0",),
        (b"Exif\0\0rubbish that is long enough",),
        ((EXIF["little"] % 6)[:-8],),  # truncated
        (EXIF["little"].replace(b"\x03\0\x01", b"\x04\0\x01") % 6,),  # a long, not a short
        (EXIF["little"].replace(b"\x01\0\x12\x01", b"\xff\xff\x12\x01") % 6,),  # more entries than there are
        (EXIF["little"].replace(b"\x08\0\0\0", b"\xff\xff\xff\xff") % 6,),  # far beyond its end
        (EXIF["little"] % 6, EXIF["little"] % 3),
        (XMP,),
        (ANOTHER % 6, XMP),
    ],
)
def test_unusual_exif_is_left_to_pillow(segments: tuple[bytes, ...]) -> None:
    assert jpeg.find_jpeg_orientation(noted(*segments)) is None
    assert jpeg.read_jpeg_header(noted(*segments)) is None
    by_pillow(noted(*segments))


def test_damaged_segments_are_left_to_pillow() -> None:
    data = encoded()
    assert jpeg.find_jpeg_orientation(data[:20]) is None
    assert jpeg.find_jpeg_orientation(data[:2] + b"\0\0" + data[2:]) is None
    assert jpeg.find_jpeg_orientation(b"\xff\xd8") is None


@pytest.mark.parametrize(
    "options", [{}, {"mode": "L"}, {"keep_rgb": True}, {"progressive": True}, {"rows": 1, "columns": 7}], ids=str
)
def test_bit_identical_to_pillow_at_every_size(options: dict[str, Any]) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(**options)
    header = jpeg.read_jpeg_header(data)
    assert header is not None
    assert header == (options.get("rows", 40), options.get("columns", 60), 1)
    for by in (1, 2, 4, 8) if header.rows > 1 else (1,):
        image = Image.open(io.BytesIO(data))
        if by > 1:
            image.draft(image.mode, (image.width // by, image.height // by))
        pixels = jpeg.try_decode_jpeg(data, header, by)
        assert pixels is not None
        assert np.array_equal(pixels, np.asarray(image.convert("RGB")))


def test_unsupported_files_are_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded()
    assert jpeg.read_jpeg_header(encoded("CMYK")) is None
    assert jpeg.read_jpeg_header(b"") is None
    assert jpeg.read_jpeg_header(b"not an image") is None
    assert jpeg.read_jpeg_header(data[:50]) is None
    header = jpeg.read_jpeg_header(data)
    assert header is not None
    assert jpeg.try_decode_jpeg(data[: len(data) // 2], header) is None  # Pillow reports the error
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    assert jpeg.read_jpeg_header(data) is None
