"""`decode_for_model` is bit-identical to `resize_and_crop(open_image(…))` for every kind of source."""

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from support.encoded_images import encode_test_image

from vitrail.base.errors import DataError
from vitrail.data.images.decoding import model_input
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import (
    PILLOW_FILTERS,
    Preprocessing,
    center_crop,
    compute_resize_size,
    get_pillow_mode,
)

PLAIN = Preprocessing(image_size=32)
CASES = [
    PLAIN,
    Preprocessing(image_size=32, crop=0.875, interpolation="bilinear"),
    Preprocessing(image_size=(24, 40), crop=0.8, middle="floored"),
    Preprocessing(image_size=32, crop=1.2),
    Preprocessing(image_size=32, crop=0.7, fit="squash"),
    Preprocessing(image_size=32, mean=(0.5,), std=(0.5,)),
]
SIZES = [(64, 100), (131, 77), (31, 33), (8, 200), (1, 5)]  # rows, columns
JPEGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "4:1:1": {"subsampling": "4:1:1"},
    "coarse": {"quality": 5},
    "finest": {"quality": 100, "subsampling": 0},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
    "rgb": {"keep_rgb": True},
    "gray": {"mode": "L"},
    "cmyk": {"mode": "CMYK"},
}
KINDS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "PNG with alpha": {"mode": "RGBA"},
    "PNG gray with alpha": {"mode": "LA"},
    "PNG of a palette": {"mode": "P"},
    "PNG of a palette, one clear": {"mode": "P", "transparency": 3},
    "PNG of one bit": {"mode": "1"},
    "PNG of 16 bits": {"mode": "I;16"},
    "GIF": {"mode": "P"},
    "WEBP": {"lossless": True},
    "WEBP with alpha": {"mode": "RGBA"},
    "BMP": {},
    "TIFF": {},
    "TIFF cmyk": {"mode": "CMYK"},
}


def expected(source: Any, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """The reference: decoded by Pillow, resized, then cropped."""
    image = open_image(source).convert(get_pillow_mode(preprocessing))
    rows, columns = compute_resize_size((image.height, image.width), preprocessing)
    if image.size != (columns, rows):
        image = image.resize((columns, rows), PILLOW_FILTERS[preprocessing.interpolation])
    pixels = np.asarray(center_crop(image, preprocessing))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def same(mine: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    assert mine.dtype == np.uint8
    assert mine.shape == other.shape
    return np.array_equal(mine, other)


def outcome(read: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8] | None:
    try:
        return read()
    except DataError:
        return None


@pytest.fixture(autouse=True)
def reduce_small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy images are too small to be decoded at a reduced size otherwise."""
    monkeypatch.setattr(model_input, "MIN_REDUCED_JPEG_PIXELS", 0)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", JPEGS)
def test_jpeg_is_bit_identical_to_open_image(kind: str) -> None:
    for rows, columns in SIZES:
        data = encode_test_image("JPEG", rows, columns, **JPEGS[kind])
        for preprocessing in CASES:
            assert same(decode_for_model(data, preprocessing), expected(data, preprocessing)), (rows, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_other_formats_are_bit_identical_to_open_image(kind: str) -> None:
    for rows, columns in SIZES:
        data = encode_test_image(kind, rows, columns, **KINDS[kind])
        for preprocessing in CASES:
            assert same(decode_for_model(data, preprocessing), expected(data, preprocessing)), (rows, columns)
            assert same(decode_for_model(data, preprocessing, reduce_jpeg=True), expected(data, preprocessing))


@pytest.mark.usefixtures("decoder")
def test_photos_are_bit_identical_to_open_image(shared: Callable[[str], Path]) -> None:
    for path in sorted(shared("imagenet-val-1000").rglob("*.JPEG"))[::50]:
        for preprocessing in (Preprocessing(), Preprocessing(crop=0.875)):
            assert same(decode_for_model(path, preprocessing), expected(path, preprocessing)), path


@pytest.mark.slow
@pytest.mark.usefixtures("decoder")
def test_a_thousand_photos_are_bit_identical_to_open_image(shared: Callable[[str], Path]) -> None:
    paths = sorted(shared("imagenet-val-1000").rglob("*.JPEG"))
    assert len(paths) == 1000
    for path in paths:
        assert same(decode_for_model(path, Preprocessing()), expected(path, Preprocessing())), path


def test_every_kind_of_source(tmp_path: Path) -> None:
    data = encode_test_image("JPEG", 50, 70)
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    reference = expected(data, PLAIN)
    for source in (path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), Image.open(path)):
        assert same(decode_for_model(source, PLAIN), reference)
    with path.open("rb") as file:
        assert same(decode_for_model(file, PLAIN), reference)
        assert same(decode_for_model(file, PLAIN), reference)  # neither closed nor left at its end
    pixels = np.asarray(open_image(data))
    for source in (pixels, pixels / 255, torch.from_numpy(pixels.copy()).permute(2, 0, 1)):
        assert same(decode_for_model(source, PLAIN), reference)


def test_unseekable_stream() -> None:
    data = encode_test_image("JPEG", 50, 70)
    read, write = os.pipe()
    with os.fdopen(write, "wb") as into:
        into.write(data)
    with os.fdopen(read, "rb") as stream:
        assert same(decode_for_model(stream, PLAIN), expected(data, PLAIN))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation_of_jpeg(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored, data = encode_test_image("JPEG", 400, 620), encode_test_image("JPEG", 400, 620, exif=exif)
    assert same(decode_for_model(data, PLAIN), expected(data, PLAIN))
    assert same(decode_for_model(data, PLAIN), expected(stored, PLAIN)) == (orientation not in range(2, 9))
    difference = np.abs(decode_for_model(data, PLAIN, reduce_jpeg=True).astype(int) - expected(data, PLAIN))
    assert 0 < difference.mean() < 1.5


def test_exif_orientation_of_png_webp_and_tiff() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for kind in ("PNG", "WEBP", "TIFF"):
        data = encode_test_image(kind, 40, 60, exif=exif)
        assert same(decode_for_model(data, PLAIN), expected(data, PLAIN))
        assert not same(decode_for_model(data, PLAIN), expected(encode_test_image(kind, 40, 60), PLAIN))


@pytest.mark.usefixtures("decoder")
def test_damaged_jpeg_gives_the_result_of_open_image() -> None:
    """Where Pillow reads it, the same bits; what it refuses may yet be read, but never ends in another error."""
    random = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [{}, {"progressive": True}, {"restart_marker_blocks": 1}]
    files = [encode_test_image("JPEG", 40, 60, **options) for options in kinds]
    read = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(300):
            damaged = bytearray(files[number % 3])
            for at in random.integers(2, len(damaged), 1 + number % 4):
                damaged[at] = random.integers(256)
            data = bytes(damaged[: random.integers(len(damaged))] if number % 5 == 0 else damaged)
            mine = outcome(lambda data=data: decode_for_model(data, PLAIN))
            other = outcome(lambda data=data: expected(data, PLAIN))
            assert other is None or (mine is not None and same(mine, other)), number
            outcome(lambda data=data: decode_for_model(data, PLAIN, reduce_jpeg=True))
            read += other is not None
    assert 30 < read < 270


def large(by: int, rows: int = 36, columns: int = 47, **options: Any) -> bytes:
    """An image of smooth shapes, of which a model of 16×16 pixels needs 1/8, 1/4 or 1/2 of the size."""
    return encode_test_image("JPEG", by * rows - 3, by * columns - 1, quality=90, **options)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"mode": "L"}, {"mode": "CMYK"}], ids=str
)
@pytest.mark.parametrize(("by", "shrunk"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (12, 8)])
def test_large_jpeg_is_decoded_at_a_reduced_size(
    by: int, shrunk: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = Preprocessing(image_size=16, crop=0.9)
    data = large(by, **options)
    reference = expected(data, preprocessing).astype(int)
    sizes = list[tuple[int, int]]()
    resize = Image.Image.resize

    def watched(image: Image.Image, size: Any, *rest: Any) -> Image.Image:
        sizes.append(image.size)
        return resize(image, size, *rest)

    monkeypatch.setattr(Image.Image, "resize", watched)
    mine = decode_for_model(data, preprocessing, reduce_jpeg=True)
    difference = np.abs(mine - reference)
    columns = by * 47 - 1
    assert sizes[0][0] == -(-columns // shrunk)
    assert (difference.max() == 0) == (shrunk == 1)
    assert difference.mean() < 0.8
    assert difference.max() <= 8
    assert shrunk == 1 or min(sizes[0]) >= 2 * 17


def test_small_jpeg_is_decoded_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of a small photo are the same with and without reduced sizes."""
    monkeypatch.undo()
    preprocessing = Preprocessing(image_size=32)
    full, reduced = (decode_for_model("example:cat", preprocessing, reduce_jpeg=each) for each in (False, True))
    assert np.array_equal(full, reduced)


@pytest.mark.parametrize("scaled", [False, True])
def test_threads_give_the_same_result(scaled: bool) -> None:
    sources = [
        encode_test_image("JPEG", 300, 400),
        encode_test_image("PNG", 90, 80, mode="RGBA"),
        encode_test_image("WEBP", 60, 70),
        large(8),
    ] * 20
    alone = [decode_for_model(source, PLAIN, reduce_jpeg=scaled) for source in sources]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(decode_for_model, source, PLAIN, reduce_jpeg=scaled) for source in sources]
        together = [each.result() for each in waiting]
    assert all(same(*each) for each in zip(alone, together, strict=True))


MEASURE = """
import sys
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.preprocessing import Preprocessing
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak()
decode_for_model(sys.argv[1], Preprocessing(), reduce_jpeg=True)
print(peak() - before, "torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_jpeg_of_100_megapixels_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    Image.new("L", (12_000, 8_400), 99).save(path)

    words = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not done.stderr  # Pillow would warn about the number of pixels
    mebibytes, torch_too = done.stdout.split()
    assert float(mebibytes) < 40  # of 288
    assert torch_too == "False"
