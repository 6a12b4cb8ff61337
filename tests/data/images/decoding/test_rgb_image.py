"""Every kind of source gives an upright RGB image, or a one-line error."""

import io
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from vitrail.base.errors import DataError
from vitrail.data.images.decoding.rgb_image import open_image

ONE_LINE = re.compile(r"^[^\n]+; expected [^\n]+$")


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def smooth(rows: int = 40, columns: int = 60) -> Image.Image:
    """An image whose corners differ, smooth enough for JPEG."""
    return Image.fromarray(noise(2, 3, 3)).resize((columns, rows), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def same(mine: Image.Image, theirs: Any) -> bool:
    assert mine.mode == "RGB"
    assert type(mine) is Image.Image
    return np.array_equal(np.asarray(mine), np.asarray(theirs))


def refused(source: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_image(source)
    assert ONE_LINE.match(str(caught.value)), caught.value
    return str(caught.value)


def outcome(source: Any) -> str:
    try:
        open_image(source)
    except DataError as error:
        return str(error)
    return "read"


def test_every_kind_of_source(tmp_path: Path) -> None:
    pixels = noise(7, 5, 3)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    data = path.read_bytes()
    assert same(open_image(path), pixels)
    assert same(open_image(str(path)), pixels)
    for source in (data, bytearray(data), memoryview(data), io.BytesIO(data), Image.open(path)):
        assert same(open_image(source), pixels)
    with path.open("rb") as file:
        assert same(open_image(file), pixels)
        assert same(open_image(file), pixels)  # neither closed nor left at its end
    for array in (pixels, pixels / 255, (pixels / 255).astype(np.float16), pixels[::-1][::-1]):
        assert same(open_image(array), pixels)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    for each in (tensor, tensor / 255, (tensor / 255).double().requires_grad_()):
        assert same(open_image(each), pixels)
    assert open_image((tensor / 255).bfloat16()).size == (5, 7)


def test_arrays_of_one_and_four_channels_and_bool() -> None:
    gray = noise(7, 5)
    expected = np.stack([gray] * 3, -1)
    for array in (gray, gray[:, :, None], torch.from_numpy(gray)[None]):
        assert same(open_image(array), expected)
    assert same(open_image(gray > 99), np.where(expected > 99, 255, 0))
    clear = np.dstack([noise(7, 5, 3), np.zeros((7, 5), np.uint8)])
    assert same(open_image(clear), np.full((7, 5, 3), 255))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(smooth(), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = ImageOps.exif_transpose(image)
        mine = open_image(data)
        assert same(mine, expected)
        assert mine.size == ((60, 40) if orientation < 5 else (40, 60))
        assert same(open_image(mine), expected)  # once, not twice
        assert same(open_image(image), expected)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0rubbish that is long enough", b"Exif\0\0II*\0\xff\xff\xff\xff"]
)
def test_broken_exif_is_ignored(exif: bytes) -> None:
    plain, broken = encoded(smooth(), "JPEG"), encoded(smooth(), "JPEG", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own
        assert same(open_image(broken), open_image(plain))


def test_transparent_parts_are_white() -> None:
    pixels = noise(8, 8, 4)
    pixels[..., 3] = np.where(np.arange(8) < 4, 0, 255)
    image = Image.fromarray(pixels)
    expected = np.where(pixels[..., 3:] == 0, 255, pixels[..., :3])
    assert same(open_image(image), expected)
    assert same(open_image(encoded(image, "PNG")), expected)
    assert same(open_image(encoded(image, "WEBP", lossless=True)), expected)
    half = Image.new("LA", (2, 2), (0, 128))
    assert np.asarray(open_image(half)).tolist() == np.full((2, 2, 3), 127).tolist()


def test_palettes() -> None:
    palette = Image.fromarray(noise(8, 8, 3)).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    assert same(open_image(palette), expected)
    assert same(open_image(encoded(palette, "PNG")), expected)
    white = np.where(np.asarray(palette)[..., None] == 3, 255, expected)
    assert same(open_image(encoded(palette, "PNG", transparency=3)), white)  # as one index
    table = bytes(0 if index == 3 else 255 for index in range(16))
    assert same(open_image(encoded(palette, "PNG", transparency=table)), white)  # as bytes
    rgb = Image.fromarray(expected)
    assert same(
        open_image(encoded(rgb, "PNG", transparency=tuple(expected[0, 0].tolist()))),
        np.where((expected == expected[0, 0]).all(-1, keepdims=True), 255, expected),
    )


def test_cmyk_gray_and_one_bit() -> None:
    for mode in ("CMYK", "L", "YCbCr"):
        data = encoded(smooth().convert(mode), "JPEG")
        with Image.open(io.BytesIO(data)) as image:
            assert same(open_image(data), image.convert("RGB"))
    near = np.asarray(open_image(encoded(smooth().convert("CMYK"), "JPEG", quality=95))).astype(int)
    assert np.abs(near - np.asarray(smooth())).max() < 40  # and not inverted
    bits = Image.fromarray(noise(9, 9)).convert("1")
    assert same(open_image(encoded(bits, "PNG")), bits.convert("RGB"))


def test_16_bit_images_are_scaled_not_clipped() -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    expected = np.stack([np.rint(values / 257)] * 3, -1)
    little, big = Image.fromarray(values), Image.fromarray(values.astype(">u2"))
    assert (little.mode, big.mode) == ("I;16", "I;16B")
    for source in (
        little,
        big,
        encoded(little, "PNG"),
        encoded(big, "TIFF"),
        Image.fromarray(values.astype("i4")),
    ):
        assert same(open_image(source), expected)
    assert "values from -7 to 70000" in refused(Image.fromarray(np.array([[-7, 70000]], np.int32)))
    assert "floats" in refused(Image.fromarray(np.zeros((2, 2), np.float32)))


def test_first_frame_of_an_animation_is_read() -> None:
    frames = [Image.new("RGB", (6, 6), color) for color in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encoded(
            frames[0], kind, save_all=True, append_images=frames[1:], **{"lossless": True} if kind == "WEBP" else {}
        )
        with Image.open(io.BytesIO(data)) as image:
            assert getattr(image, "n_frames", 1) == 3
        assert same(open_image(data), frames[0])


def test_input_is_not_modified() -> None:
    image = smooth().convert("RGBA")
    image.info["exif"] = b""
    array = noise(4, 4, 3)
    kept = array.copy()
    open_image(image).putpixel((0, 0), (1, 2, 3))
    open_image(array).putpixel((0, 0), (1, 2, 3))
    rgb = smooth()
    open_image(rgb).putpixel((0, 0), (1, 2, 3))
    assert rgb.tobytes() == smooth().tobytes()
    assert image.tobytes() == smooth().convert("RGBA").tobytes()
    assert image.info == {"exif": b""}
    assert np.array_equal(array, kept)


def test_unreadable_files_are_one_line_errors(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.jpg")
    assert "is a folder" in refused(tmp_path)
    (tmp_path / "text.jpg").write_text("not an image\n")
    (tmp_path / "empty.jpg").touch()
    for source in (
        tmp_path / "text.jpg",
        tmp_path / "empty.jpg",
        b"",
        b"\0" * 99,
        io.BytesIO(b"text"),
        io.StringIO("text"),
    ):
        assert any(message in refused(source) for message in ("is not an image", "cannot be read", "is empty"))
    refused("a\0b")
    refused("a" * 300)
    refused(tmp_path / "two\nlines.jpg")
    for source in (None, 7, ["a.jpg"], object()):
        assert "expected a path, bytes" in refused(source)
    closed = Image.open(io.BytesIO(encoded(smooth(), "PNG")))
    closed.close()
    refused(closed)
    refused(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated_and_damaged_files_are_one_line_errors(kind: str) -> None:
    data = encoded(smooth(), kind)
    assert "expected" in refused(data[: len(data) // 2])
    random.seed(0)
    for cut in range(0, len(data) - 1, max(len(data) // 100, 1)):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[random.randrange(len(data))] = random.randrange(256)
        for source in (data[:cut], bytes(damaged)):
            result = outcome(source)
            assert result == "read" or ONE_LINE.match(result), result


@pytest.mark.parametrize("limit", [1000, 1500, 2000])  # of 2400 pixels: Pillow raises an error beyond twice the limit
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_decompression_bombs_are_refused(limit: int, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(smooth(), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        assert f"is 40×60 pixels; expected at most {limit} pixels" in refused(data)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        open_image(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: noise(3, 8, 8), "np.moveaxis(array, 0, -1)"),
        (lambda: noise(8, 8, 2), "shape (8, 8, 2)"),
        (lambda: noise(2, 8, 8, 3), "shape (2, 8, 8, 3)"),
        (lambda: noise(8), "shape (8,)"),
        (lambda: noise(0, 8, 3), "shape (0, 8, 3)"),
        (lambda: noise(8, 8, 3).astype(np.int64), "int64"),
        (lambda: noise(8, 8, 3).astype(np.uint16), "uint16"),
        (lambda: noise(8, 8, 3).astype(complex), "complex128"),
        (lambda: np.full((8, 8), None), "object"),
        (lambda: noise(8, 8, 3).astype(np.float32), "from 0 to 249; expected 0 to 1: divide"),
        (lambda: np.full((8, 8), np.nan), "nan"),
        (lambda: np.full((8, 8), -0.1), "-0.1"),
        (lambda: torch.zeros(8, 8, 3), "shape (8, 8, 3)"),
        (lambda: torch.zeros(1, 3, 8, 8), "without a batch"),
        (lambda: torch.zeros(3, 0, 8), "shape (0, 8, 3)"),
        (lambda: torch.zeros(3, 8, 8, dtype=torch.int64), "int64"),
        (lambda: torch.zeros(3, 8, 8, device="meta"), "cannot be read"),
    ],
)
def test_invalid_arrays_and_tensors_are_refused(make: Callable[[], Any], message: str) -> None:
    assert message in refused(make())
