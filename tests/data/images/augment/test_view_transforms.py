"""Colours of views: drawn by key, at their rates, in the order of torchvision's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from vitrail.base.errors import ConfigError
from vitrail.data.images.augment import view_transforms
from vitrail.data.images.augment.view_config import ViewAugmentation
from vitrail.data.images.augment.view_transforms import ColourDraws, recolour
from vitrail.data.rng import make_view_keys, uniform_randoms

NONE = ViewAugmentation()
ALL = ViewAugmentation(
    brightness=0.8,
    contrast=0.8,
    saturation=0.8,
    hue=0.2,
    grey_rate=0.2,
    blur_rate=0.5,
    blur_kernel=0.3,
    solarize_rate=0.2,
)
THEIRS: tuple[Any, ...] = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)


def make_pixels(count: int, channels: int = 3) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, channels, 16, 20), dtype=np.uint8))


def change(pixels: Tensor, augmentation: ViewAugmentation, keys: NDArray[np.uint64]) -> Tensor:
    pixels = pixels.clone()
    recolour(pixels, augmentation, keys)
    return pixels


@pytest.mark.parametrize("channels", [1, 3])
def test_views_equal_torchvision_with_the_same_choices(channels: int) -> None:
    pixels, keys = make_pixels(40, channels), make_view_keys(0, 0, np.arange(40), 0)
    augmentation = replace(ALL, solarize_rate=0.0)
    draws, changed = ColourDraws(augmentation, keys), change(pixels, augmentation, keys)
    for row, (image, result) in enumerate(zip(pixels, changed, strict=True)):
        expected = image / 255
        assert (draws.order[row] >= 0).all() == draws.jitter[row]
        for operation in draws.order[row].tolist() if draws.jitter[row] else ():
            expected = THEIRS[operation](expected, draws.amounts[row, operation].item())
        if draws.grey[row]:
            expected = tv.rgb_to_grayscale(expected, num_output_channels=channels)
        if draws.blur[row]:
            expected = tv.gaussian_blur(expected, [5, 5], [draws.sigmas[row]] * 2)
        assert (result - expected * 255).abs().max() <= 0.51, "rounded once, at the end"
    assert draws.jitter.any()
    assert draws.grey.any()
    assert draws.blur.any()


def test_view_depends_only_on_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, keys = make_pixels(30), make_view_keys(0, 0, np.arange(30), 0)
    together = change(pixels, ALL, keys)
    monkeypatch.setattr(view_transforms, "CHUNK_VALUES", 3000)
    assert torch.equal(change(pixels, ALL, keys), together)
    for row in (0, 13, 29):
        assert torch.equal(change(pixels[row : row + 1], ALL, keys[row : row + 1])[0], together[row])
    assert change(pixels[:0], ALL, keys[:0]).shape == (0, 3, 16, 20)
    others = change(pixels, ALL, make_view_keys(0, 0, np.arange(30), 1))
    assert sum(torch.equal(a, b) for a, b in zip(together, others, strict=True)) < 5


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("jitter_rate", {"brightness": 0.5}),
        ("jitter_rate", {"hue": 0.2}),
        ("grey_rate", {}),
        ("blur_rate", {"blur_sigma": (1.0, 1.0), "blur_kernel": 0.3}),
        ("solarize_rate", {}),
    ],
)
def test_rates(name: str, others: dict[str, Any]) -> None:
    pixels, keys = make_pixels(1).expand(800, -1, -1, -1), make_view_keys(0, 0, np.arange(800), 0)
    for rate in (0.0, 0.3, 1.0):
        changed = change(pixels, replace(NONE, **{**others, name: rate}), keys)
        share = (changed != pixels).flatten(1).any(1).float().mean()
        assert abs(share - rate) < (0.06 if 0 < rate < 1 else 0.01)


def test_choices_are_independent_of_one_another_and_of_the_crop() -> None:
    keys = make_view_keys(0, 0, np.arange(2000), 0)
    draws = ColourDraws(replace(ALL, jitter_rate=0.5, grey_rate=0.5, solarize_rate=0.5), keys)
    choices = (uniform_randoms(keys, 1)[:, 0] < 0.5, draws.jitter, draws.grey, draws.blur, draws.solarize)
    shares = np.corrcoef(np.stack(choices).astype(float))
    assert np.abs(shares - np.eye(5)).max() < 0.1
    orders, counts = np.unique(draws.order[draws.jitter], axis=0, return_counts=True)
    assert len(orders) == 24
    assert counts.min() > 20


@pytest.mark.parametrize(
    "fields",
    [
        {"area": (0.5, 0.1)},
        {"area": (0.5, 2.0)},
        {"hue": 0.6},
        {"brightness": -0.1},
        {"blur_sigma": (2.0, 1.0)},
        {"blur_sigma": (0.0, 1.0)},
        {"grey_rate": 1.5},
        {"solarize_threshold": 256},
    ],
)
def test_bad_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ViewAugmentation(**fields)
