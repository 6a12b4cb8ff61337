"""Random boxes as in torchvision, and JPEGs decoded at the smallest size that suffices."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from torchvision.transforms import RandomResizedCrop

from vitrail.base.errors import DataError
from vitrail.data.images.decoding import jpeg as decoder
from vitrail.data.images.decoding.crops import (
    UNIFORMS_PER_BOX,
    CropBox,
    SizedBox,
    decode_crop,
    decode_crops,
    random_resized_crop_box,
)
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.rng import make_view_keys, uniform_randoms

AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


def smooth(rows: int, columns: int) -> Image.Image:
    colors = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((columns, rows), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 95, **options})
    return file.getvalue()


def max_difference(mine: Any, other: Any) -> int:
    assert mine.shape == np.asarray(other).shape
    return int(np.abs(mine.astype(int) - np.asarray(other)).max())


def everything(rows: int, columns: int) -> CropBox:
    return CropBox(0, 0, rows, columns)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 3000),
    columns=st.integers(1, 3000),
    area=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
    aspect=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)).map(sorted),
    key=st.integers(0, 2**64 - 1),
)
def test_box_is_inside_the_image(rows: int, columns: int, area: list[float], aspect: list[float], key: int) -> None:
    draws = uniform_randoms(np.array([key], np.uint64), UNIFORMS_PER_BOX)[0].tolist()
    box = random_resized_crop_box(rows, columns, area, aspect, draws)
    assert 0 <= box.top <= box.top + box.rows <= rows
    assert 0 <= box.left <= box.left + box.columns <= columns
    assert box.rows > 0
    assert box.columns > 0


@pytest.mark.parametrize(("rows", "columns"), [(375, 500), (500, 375), (224, 224), (100, 400)])
def test_boxes_are_distributed_as_in_torchvision(rows: int, columns: int) -> None:
    count = 4000
    many = uniform_randoms(make_view_keys(0, 0, np.arange(count), 0), UNIFORMS_PER_BOX).tolist()
    mine = np.array([random_resized_crop_box(rows, columns, AREA, ASPECT, draws) for draws in many], float)
    image = Image.new("L", (columns, rows))
    theirs: Any = RandomResizedCrop.get_params
    other = np.array([theirs(image, AREA, ASPECT) for _ in range(count)], float)
    shares = mine[:, 2] * mine[:, 3] / (rows * columns)
    assert shares.min() > 0.07
    assert shares.max() <= 1
    inside = np.abs(np.log(mine[:, 3] / mine[:, 2])) < np.log(4 / 3) + 0.05
    assert inside.all()
    scale = np.array([rows, columns, rows, columns])
    assert np.abs(mine.mean(0) - other.mean(0)).max() / scale.max() < 0.02
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert (np.abs(np.quantile(mine, share, 0) - np.quantile(other, share, 0)) / scale).max() < 0.04


@pytest.mark.parametrize(("rows", "columns"), [(10, 1000), (1000, 10), (30, 30)])
def test_fallback_box_equals_torchvision(rows: int, columns: int) -> None:
    theirs: Any = RandomResizedCrop.get_params
    expected = theirs(Image.new("L", (columns, rows)), (2.0, 2.0), ASPECT)
    assert random_resized_crop_box(rows, columns, (2.0, 2.0), ASPECT, [0.5] * UNIFORMS_PER_BOX) == expected


def test_crop_of_every_kind_of_source(tmp_path: Path) -> None:
    image = smooth(50, 70)
    path = tmp_path / "a.png"
    image.save(path)
    data = path.read_bytes()
    expected = np.asarray(image)[7:37, 11:61]

    def choose(rows: int, columns: int) -> CropBox:
        assert (rows, columns) == (50, 70)
        return CropBox(7, 11, 30, 50)

    for source in (
        path,
        str(path),
        data,
        bytearray(data),
        memoryview(data),
        io.BytesIO(data),
        image,
        np.asarray(image),
    ):
        assert max_difference(decode_crop(source, choose, (8, 8)), expected) == 0


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(("target", "shrink"), [(200, 1), (100, 2), (50, 4), (33, 4), (25, 8), (3, 8)])
def test_jpeg_is_decoded_at_the_smallest_sufficient_size(
    target: int, shrink: int, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not quick:
        monkeypatch.setattr(decoder, "simplejpeg", None)
    image = smooth(331, 447)

    def choose(rows: int, columns: int) -> CropBox:
        return CropBox(104, 200, 200, 240)

    mine = decode_crop(jpeg(image), choose, (target, target))
    assert mine.shape == (200 // shrink, 240 // shrink, 3)
    exact = image.resize((mine.shape[1], mine.shape[0]), Image.Resampling.BOX, (200, 104, 440, 304))
    assert np.abs(mine.astype(int) - np.asarray(exact)).mean() < 3


@pytest.mark.parametrize("quick", [True, False])
def test_several_boxes_are_decoded_at_the_smallest_size_that_suffices_for_all(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not quick:
        monkeypatch.setattr(decoder, "simplejpeg", None)
    data, boxes = jpeg(smooth(331, 447)), (CropBox(104, 200, 200, 240), CropBox(10, 20, 80, 64))
    for sizes, shrink in ((((100, 100), (32, 32)), 2), (((50, 50), (8, 8)), 4), (((200, 200), (8, 8)), 1)):

        def choose(rows: int, columns: int, sizes: Any = sizes) -> list[SizedBox]:
            assert (rows, columns) == (331, 447)
            return [SizedBox(box, size) for box, size in zip(boxes, sizes, strict=True)]

        both = decode_crops(data, choose)
        assert [crop.shape[:2] for crop in both] == [(box.rows // shrink, box.columns // shrink) for box in boxes]
        alone = decode_crop(data, lambda rows, columns, choose=choose: choose(rows, columns)[0].box, sizes[0])
        assert max_difference(both[0], alone) == 0


@pytest.mark.parametrize("options", [{}, {"subsampling": 2}, {"progressive": True}, {"keep_rgb": True}])
@pytest.mark.parametrize("target", [300, 150, 60, 20])
def test_simplejpeg_and_pillow_agree(options: dict[str, Any], target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    data = jpeg(smooth(331, 447), **options)
    quick = decode_crop(data, everything, (target, target))
    monkeypatch.setattr(decoder, "simplejpeg", None)
    assert max_difference(quick, decode_crop(data, everything, (target, target))) <= 2


def test_simplejpeg_and_pillow_agree_on_photos(shared: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    photos = sorted(shared("imagenet-val-1000").rglob("*.JPEG"))[::100]
    quick = [decode_crop(photo, everything, (least, least)) for photo in photos for least in (224, 100)]
    monkeypatch.setattr(decoder, "simplejpeg", None)
    slow = [decode_crop(photo, everything, (least, least)) for photo in photos for least in (224, 100)]
    assert max(max_difference(mine, other) for mine, other in zip(quick, slow, strict=True)) <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("target", [200, 40])
def test_exif_orientation_is_applied_to_image_and_box(orientation: int, target: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = jpeg(smooth(200, 320), exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)

    def choose(rows: int, columns: int) -> CropBox:
        assert (columns, rows) == upright.size
        return CropBox(8, 16, 160, 176)

    mine = decode_crop(data, choose, (target, target))
    expected = upright.resize((mine.shape[1], mine.shape[0]), Image.Resampling.BOX, (16, 8, 192, 168))
    assert mine.shape == ((160, 176, 3) if target == 200 else (40, 44, 3))
    assert np.abs(mine.astype(int) - np.asarray(expected)).mean() < 3


@pytest.mark.parametrize("mode", ["L", "CMYK", "YCbCr"])
def test_other_jpeg_modes_equal_open_image(mode: str) -> None:
    data = jpeg(smooth(40, 60).convert(mode))
    assert max_difference(decode_crop(data, everything, (50, 50)), open_image(data)) == 0


def test_unreadable_images_are_one_line_errors(tmp_path: Path) -> None:
    whole = jpeg(smooth(200, 300))
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("not an image")
    for source, message in (
        (tmp_path / "none.jpg", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "cut.jpg", "cannot be read"),
        (tmp_path / "text.jpg", "is not an image"),
        (b"", "is empty"),
        ("a\0b", "cannot be read"),
        (7, "expected a path, bytes"),
    ):
        with pytest.raises(DataError, match=message):
            decode_crop(source, everything, (8, 8))


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg(smooth(40, 60))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="is 40×60 pixels; expected at most 1000 pixels"):
        decode_crop(data, everything, (8, 8))
