"""Changes of colours equal torchvision's with the same amounts, for any batch that an image is in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from vitrail.data.images.augment import colours

SIGMAS = (0.1, 0.7, 2.0, 3.5)
FACTORS = (0.0, 0.3, 1.0, 1.8)
SHIFTS = (-0.5, -0.1, 0.0, 0.37)


def make_pixels(count: int = 4, channels: int = 3) -> Tensor:
    """Noise, with black, white, grey and pure colours in one row."""
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, channels, 30, 41), dtype=np.uint8))
    pixels[:, :, 0, :8] = torch.tensor([[n & 1, n >> 1 & 1, n >> 2] for n in range(8)]).T[:channels] * 255
    pixels[:, :, 1, :8] = 97
    return pixels


def blur(images: Tensor, sigmas: Tensor) -> Tensor:
    return colours.gaussian_blur(images, sigmas.double().numpy(), 5)


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, float], Any], tuple[float, ...]]] = {
    "brightness": (colours.adjust_brightness, tv.adjust_brightness, FACTORS),
    "contrast": (colours.adjust_contrast, tv.adjust_contrast, FACTORS),
    "saturation": (colours.adjust_saturation, tv.adjust_saturation, FACTORS),
    "hue": (colours.adjust_hue, tv.adjust_hue, SHIFTS),
    "grey": (lambda x, _: colours.to_grey(x), lambda x, _: tv.rgb_to_grayscale(x, x.shape[0]), FACTORS),
    "blur": (blur, lambda x, sigma: tv.gaussian_blur(x, [11, 11], [sigma, sigma]), SIGMAS),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_torchvision(name: str, channels: int) -> None:
    """On floats within 0.001 levels, but for the exact mean and the end of the blur; uint8 is truncated there."""
    mine, theirs, amounts = OPERATIONS[name]
    pixels = make_pixels(channels=channels)
    given = pixels.float()
    changed = mine(given, torch.tensor(amounts))
    assert torch.equal(given, pixels.float()), "the images are not changed in place"
    for image, result, amount in zip(pixels, changed, amounts, strict=True):
        exact = theirs(image.float() / 255, amount) * 255
        assert (result - exact).abs().max() <= (0.02 if name == "blur" else 0.005 if name == "contrast" else 1e-3)
        assert (result.round() - theirs(image, amount)).abs().max() <= (2 if name == "saturation" else 1)


def test_solarize_equals_torchvision() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for threshold in (0, 1, 128, 255):
        assert torch.equal(colours.solarize(pixels, threshold), tv.solarize(pixels, threshold))


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_does_not_depend_on_the_batch(name: str) -> None:
    mine, _, amounts = OPERATIONS[name]
    images, factors = make_pixels(12).float(), torch.tensor(amounts).repeat(3)
    together = mine(images, factors)
    for row in range(12):
        assert torch.equal(mine(images[row : row + 1], factors[row : row + 1])[0], together[row])


def test_blur_radius_is_a_share_of_the_shorter_side() -> None:
    sizes = ((224, 300), (96, 96), (32, 32), (8, 8))
    assert [colours.compute_blur_radius(torch.empty(1, 3, *size), 0.1) for size in sizes] == [11, 4, 1, 0]
    assert colours.compute_blur_radius(torch.empty(1, 3, 3, 3), 1.0) == 1
