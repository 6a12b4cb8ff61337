"""Preprocessing equals that of timm, torchvision and transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from timm.data import transforms_factory
from torchvision import transforms
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, compute_visible_box, preprocess_image
from vitrail.models.base.checks import Size

SIZES = [(256, 300), (224, 224), (375, 500), (37, 53), (641, 31), (1, 7), (2, 90)]  # rows, columns
CASES: list[dict[str, Any]] = [
    {"image_size": 224, "crop": 0.875, "interpolation": "bilinear"},
    {"image_size": 224, "crop": 0.9, "interpolation": "bicubic"},
    {"image_size": 384, "crop": 1.0, "interpolation": "bicubic"},
    {"image_size": 97, "crop": 0.95, "interpolation": "bicubic"},
    {"image_size": 96, "crop": 1.15, "interpolation": "bicubic"},  # as timm's VOLO: a black border
    {"image_size": 97, "crop": 1.3, "interpolation": "bilinear", "fit": "squash"},
    {"image_size": 224, "crop": 0.9, "interpolation": "bicubic", "fit": "squash"},
    {"image_size": (64, 33), "crop": 0.8, "interpolation": "bicubic", "fit": "squash"},
    {"image_size": (64, 32), "crop": 0.875, "interpolation": "bilinear"},  # timm: always bilinear if not a square
    {"image_size": (48, 80), "crop": 1.0, "interpolation": "bilinear"},
]
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def make_image(rows: int, columns: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8))


def photos(shared: Callable[[str], Path]) -> list[Path]:
    return sorted(shared("imagenet-val-1000").rglob("*.JPEG"))[::125]


def max_difference(mine: Any, theirs: Any) -> float:
    assert mine.dtype == np.float32
    assert mine.shape == theirs.shape
    return float(np.abs(mine - np.asarray(theirs)).max())


def from_timm(image: Image.Image, fit: str = "short_side", **fields: Any) -> Any:
    mode = "squash" if fit == "squash" else "center"
    size = fields["image_size"]
    settings = {"crop_pct": fields["crop"], "interpolation": fields["interpolation"], "crop_mode": mode, **IMAGENET}
    create: Any = transforms_factory.create_transform
    return create(size, is_training=False, **settings)(image)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_timm(case: dict[str, Any]) -> None:
    for rows, columns in SIZES:
        for image in (make_image(rows, columns), make_image(columns, rows)):
            assert (
                max_difference(preprocess_image(image, Preprocessing(**case, **IMAGENET)), from_timm(image, **case))
                <= 1e-6
            )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_timm_on_photos(case: dict[str, Any], shared: Callable[[str], Path]) -> None:
    for path in photos(shared):
        mine = preprocess_image(open_image(path), Preprocessing(**case, **IMAGENET))
        assert max_difference(mine, from_timm(Image.open(path).convert("RGB"), **case)) <= 1e-6


def test_equal_to_torchvision() -> None:
    theirs: Any = transforms.Compose(
        [
            transforms.Resize(256, transforms.InterpolationMode.BILINEAR),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET["mean"], IMAGENET["std"]),
        ]
    )
    preprocessing = Preprocessing(crop=0.875, interpolation="bilinear", **IMAGENET)
    for rows, columns in SIZES:
        image = make_image(rows, columns)
        assert max_difference(preprocess_image(image, preprocessing), theirs(image)) <= 1e-6


def test_equal_to_transformers() -> None:
    theirs: Any = ViTImageProcessorPil()
    preprocessing = Preprocessing(crop=1.0, fit="squash", interpolation="bilinear")
    for rows, columns in SIZES[:-2]:  # too thin for it to tell rows from channels
        image = make_image(rows, columns)
        assert max_difference(preprocess_image(image, preprocessing), theirs(image)["pixel_values"][0]) <= 1e-6


@pytest.mark.parametrize("size", [224, (32, 64)])
def test_image_of_the_right_size_is_not_resampled(size: Size) -> None:
    preprocessing = Preprocessing(image_size=size, crop=1.0, mean=(0, 0, 0), std=(1, 1, 1))
    rows, columns = (size, size) if isinstance(size, int) else size
    image = make_image(rows, columns)
    assert np.array_equal(np.rint(preprocess_image(image, preprocessing) * 255), np.asarray(image).transpose(2, 0, 1))


def test_one_mean_is_one_channel() -> None:
    image = make_image(50, 60)
    mine = preprocess_image(image, Preprocessing(image_size=32, mean=(0.1,), std=(0.3,)))
    gray = np.asarray(image.convert("L").resize((42, 35), Image.Resampling.BICUBIC), np.float32)[2:34, 5:37]
    assert mine.shape == (1, 32, 32)
    assert max_difference(mine, (gray / 255 - np.float32(0.1))[None] / np.float32(0.3)) <= 1e-6


def test_result_is_writable_and_contiguous() -> None:
    mine = preprocess_image(make_image(50, 60), Preprocessing(image_size=32))
    assert mine.flags.c_contiguous
    assert mine.flags.writeable


def test_thin_images_are_refused_before_they_fill_the_memory() -> None:
    with pytest.raises(DataError, match="1×10000 pixels would be resized to 248×2480000; expected at most"):
        preprocess_image(Image.new("RGB", (10000, 1)), Preprocessing())
    assert preprocess_image(Image.new("RGB", (10000, 1)), Preprocessing(fit="squash")).shape == (3, 224, 224)
    with pytest.raises(DataError, match="expected at most"):
        preprocess_image(make_image(8, 8), Preprocessing(crop=1e-3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"crop": 0}, "more than 0"),
        ({"crop": 1000}, "share of the image"),
        ({"mean": (0.5,)}, "1 means and 3 stds"),
        ({"std": (0.5, 0.5, 0)}, "more than 0"),
        ({"fit": "shortside"}, "did you mean 'short_side'"),
        ({"interpolation": "nearest"}, "interpolation"),
    ],
)
def test_invalid_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preprocessing(**fields)


def test_two_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 means; expected 3, or 1"):
        preprocess_image(make_image(8, 8), Preprocessing(mean=(0.5, 0.5), std=(0.5, 0.5)))


FRAMES: list[dict[str, Any]] = [
    {"image_size": 64, "crop": 0.875},
    {"image_size": 64, "crop": 1.0, "interpolation": "bilinear"},
    {"image_size": 63, "crop": 0.5, "middle": "floored"},
    {"image_size": 64, "crop": 0.8, "fit": "squash"},
    {"image_size": (64, 32), "crop": 0.9},
    {"image_size": (48, 80), "crop": 1.0, "fit": "squash"},
    {"image_size": 64, "crop": 1.25},  # a black border
    {"image_size": 64, "crop": 1.25, "fit": "squash"},
]


@pytest.mark.parametrize("case", FRAMES, ids=str)
@pytest.mark.parametrize("size", [(150, 200), (400, 130), (160, 160), (131, 257)])
def test_visible_box_matches_the_pixels(case: dict[str, Any], size: tuple[int, int]) -> None:
    """Red encodes the column and green the row of an image, so each pixel tells where it came from."""
    rows, columns = size
    photo = np.zeros((rows, columns, 3), np.uint8)
    photo[..., 0] = np.rint(255 * (np.arange(columns) + 0.5) / columns)
    photo[..., 1] = np.rint(255 * (np.arange(rows) + 0.5) / rows)[:, None]
    photo[..., 2] = 255  # the border has none
    preprocessing = Preprocessing(**case, mean=(0, 0, 0), std=(1, 1, 1))
    pixels = preprocess_image(Image.fromarray(photo), preprocessing)
    left, top, right, bottom = compute_visible_box(size, preprocessing)
    _, height, width = pixels.shape
    across = (left + (np.arange(width) + 0.5) / width * (right - left)) / columns  # centers of the pixels
    down = (top + (np.arange(height) + 0.5) / height * (bottom - top)) / rows
    inside = (down[:, None] > 0.04) & (down[:, None] < 0.96) & (across > 0.04) & (across < 0.96)  # edges are blurred
    assert inside.mean() > 0.4
    assert (pixels[2][inside] == 1).all()
    assert np.abs(pixels[0] - across)[inside].max() < 0.006  # a rounded value is off by half of 1/255
    assert np.abs(pixels[1] - down[:, None])[inside].max() < 0.006
    outside = (down[:, None] < -0.01) | (down[:, None] > 1.01) | (across < -0.01) | (across > 1.01)
    assert (pixels[2][outside] == 0).all()
    assert outside.any() == (case["crop"] > 1 and (left < 0 or top < 0))


def test_visible_box_of_simple_cases() -> None:
    assert compute_visible_box((100, 200), Preprocessing(image_size=50, crop=1.0)) == (50, 0, 150, 100)
    assert compute_visible_box((200, 100), Preprocessing(image_size=50, crop=0.5)) == (25, 75, 75, 125)
    assert compute_visible_box((200, 100), Preprocessing(image_size=50, crop=0.5, fit="squash")) == (25, 50, 75, 150)
    assert compute_visible_box((100, 100), Preprocessing(image_size=60, crop=1.2)) == (-10, -10, 110, 110)
    assert compute_visible_box((1, 1), Preprocessing(image_size=224, crop=1.0)) == (0, 0, 1, 1)
