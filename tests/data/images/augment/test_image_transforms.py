"""A view depends only on image and key, has the model's size, and equals evaluation by default."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.augment.batch_transforms import normalise
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.image_transforms import augment_image, can_augment_as_batch, shift_and_flip_batch
from vitrail.data.images.decoding.crops import UNIFORMS_PER_BOX, random_resized_crop_box
from vitrail.data.images.preprocessing import PILLOW_FILTERS, Preprocessing, preprocess_image
from vitrail.data.rng import make_view_keys, uniform_randoms

GREY: dict[str, Any] = {"mean": (0.3,), "std": (0.2,)}


def make_image(rows: int = 50, columns: int = 70, seed: int = 0) -> Image.Image:
    colours = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((columns, rows), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    "options", [{}, GREY, {"fit": "squash"}, {"image_size": (40, 24), "interpolation": "bilinear"}]
)
def test_default_equals_evaluation(options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"image_size": 32, **options}
    preprocessing = Preprocessing(**fields)
    pixels = augment_image(make_image(), Augmentation(), preprocessing, 7)
    assert torch.equal(
        normalise(pixels, preprocessing), torch.from_numpy(preprocess_image(make_image(), preprocessing))
    )


@settings(max_examples=100, deadline=None)
@given(
    crop=st.sampled_from(["centre", "resized", "shift"]),
    policy=st.sampled_from(["none", "rand", "auto", "three"]),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    jitter=st.sampled_from([0.0, 0.3]),
    grey=st.booleans(),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    given_size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    key=st.integers(0, 2**64 - 1),
)
def test_view_has_the_model_size_and_depends_only_on_the_key(
    crop: Any,
    policy: Any,
    flip: float,
    jitter: float,
    grey: bool,
    size: tuple[int, int],
    given_size: tuple[int, int],
    key: int,
) -> None:
    augmentation = Augmentation(crop=crop, policy=policy, flip=flip, jitter=jitter)
    preprocessing = Preprocessing(image_size=size, crop=1.0, **(GREY if grey else {}))
    image = make_image(*given_size)
    mine = augment_image(image, augmentation, preprocessing, key)
    assert mine.dtype == torch.uint8
    assert mine.shape == (1 if grey else 3, *size)
    assert mine.is_contiguous()
    assert torch.equal(mine, augment_image(np.asarray(image), augmentation, preprocessing, key))
    mine.zero_()  # the view owns its memory
    assert image.tobytes() == make_image(*given_size).tobytes()


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(crop="resized"),
        Augmentation(crop="shift"),
        Augmentation(flip=0.5),
        Augmentation(policy="rand"),
        Augmentation(policy="auto"),
        Augmentation(policy="three"),
        Augmentation(jitter=0.4),
    ],
)
def test_different_keys_give_different_views(augmentation: Augmentation) -> None:
    views = {
        bytes(augment_image(make_image(), augmentation, Preprocessing(image_size=32), key).numpy()) for key in range(40)
    }
    assert len(views) > (1 if augmentation.crop == "centre" and augmentation.flip else 10)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(300, 400), (40, 50), (224, 80)])
@pytest.mark.parametrize("grey", [False, True])
def test_resize_equals_pillow_within_two_levels(interpolation: Any, size: tuple[int, int], grey: bool) -> None:
    # no overshooting: both clip values between the two passes, but the order of the passes may differ
    noise = np.random.default_rng(1).integers(70, 190, (*size, 3), dtype=np.uint8)
    augmentation = Augmentation(crop="resized", flip=0.5)
    preprocessing = Preprocessing(image_size=(96, 112), interpolation=interpolation, **(GREY if grey else {}))
    for key in range(20):
        flip, *draws = uniform_randoms(np.array([key], np.uint64), 1 + UNIFORMS_PER_BOX)[0].tolist()
        top, left, rows, columns = random_resized_crop_box(*size, augmentation.area, augmentation.aspect, draws)
        part = Image.fromarray(noise).convert("L" if grey else "RGB").crop((left, top, left + columns, top + rows))
        expected = np.asarray(part.resize((112, 96), PILLOW_FILTERS[interpolation])).reshape(96, 112, -1)
        expected = expected[:, ::-1] if flip < 0.5 else expected
        mine = augment_image(noise, augmentation, preprocessing, key).permute(1, 2, 0).numpy()
        assert np.abs(mine.astype(int) - expected).max() <= 2


def test_crop_is_the_same_for_every_kind_of_source() -> None:
    image = make_image(300, 400)
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, "PNG")
    image.save(jpeg, "JPEG", quality=98, subsampling=0)
    augmentation, preprocessing = Augmentation(crop="resized", flip=0.5), Preprocessing(image_size=48)
    for key in range(10):
        exact = augment_image(image, augmentation, preprocessing, key)
        assert torch.equal(augment_image(png.getvalue(), augmentation, preprocessing, key), exact)
        near = augment_image(jpeg.getvalue(), augmentation, preprocessing, key)  # sometimes decoded at half the size
        assert (near.int() - exact.int()).abs().float().mean() < 4


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(),
        Augmentation(flip=0.5),
        Augmentation(crop="shift"),
        Augmentation(crop="shift", shift=0, flip=1.0),
        Augmentation(crop="shift", shift=3, flip=0.5),
        Augmentation(crop="shift", shift=40),
    ],
)
def test_batch_path_equals_image_path(augmentation: Augmentation, channels: int) -> None:
    assert can_augment_as_batch(augmentation)
    preprocessing = Preprocessing(image_size=(28, 20), crop=1.0, **(GREY if channels == 1 else {}))
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 20, channels), dtype=np.uint8)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    kept, given_keys = pixels.clone(), make_view_keys(0, 1, np.arange(30), 0)
    mine = shift_and_flip_batch(pixels, augmentation, given_keys)
    for image, key, each in zip(images, given_keys.tolist(), mine, strict=True):
        assert torch.equal(each, augment_image(image, augmentation, preprocessing, key))
    assert torch.equal(pixels, kept)


def test_shifts_cover_the_full_range() -> None:
    pixels = torch.arange(20, dtype=torch.uint8).expand(500, 1, 20, 20).contiguous()
    mine = shift_and_flip_batch(pixels, Augmentation(crop="shift", shift=2), make_view_keys(0, 0, np.arange(500), 0))
    middle = mine[:, 0, 10, 10].int() - 10
    assert sorted(set(middle.tolist())) == [-2, -1, 0, 1, 2]
    assert torch.bincount(middle + 2).min() > 60
    assert mine[middle == -2][0, 0, 0].tolist()[:4] == [2, 1, 0, 1]  # mirrored at the border


def test_flips_occur_at_the_given_rate() -> None:
    pixels = torch.arange(4, dtype=torch.uint8).expand(4000, 1, 4, 4).contiguous()
    mine = shift_and_flip_batch(pixels, Augmentation(flip=0.3), make_view_keys(0, 0, np.arange(4000), 0))
    assert abs(int((mine[:, 0, 0, 0] == 3).sum()) - 1200) < 5 * 840**0.5


@pytest.mark.parametrize("changed", [{"crop": "resized"}, {"policy": "rand"}, {"jitter": 0.1}])
def test_which_augmentations_need_single_images(changed: dict[str, Any]) -> None:
    assert not can_augment_as_batch(Augmentation(**changed))


def test_unreadable_images_are_one_line_errors() -> None:
    for crop in ("centre", "resized"):
        with pytest.raises(DataError, match="is not an image"):
            augment_image(b"text", Augmentation(crop=crop), Preprocessing(), 0)
        with pytest.raises(ConfigError, match="2 means; expected 3, or 1"):
            augment_image(make_image(), Augmentation(crop=crop), Preprocessing(mean=(0.5, 0.5), std=(1, 1)), 0)
