"""The hybrid ViT: patches of a ResNet's feature map."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.noisy_weights import add_weight_noise

from vitrail.base.errors import ConfigError
from vitrail.models.hybrid import Hybrid, HybridConfig
from vitrail.models.parts.convolutions import StdConv2d, pad_same

TOY = HybridConfig(image_size=(32, 64), stages=(1, 1), width=16, depth=2, heads=2, classes=5)


@pytest.mark.parametrize(
    ("stages", "patch", "stride"), [((), 8, 32), ((), 1, 4), ((1,), 1, 4), ((1, 1), 2, 16), ((3, 4, 9), 1, 16)]
)
def test_stride_is_that_of_the_feature_map(stages: tuple[int, ...], patch: int, stride: int) -> None:
    config = replace(TOY, stages=stages, patch_size=patch)
    assert config.stride == (stride, stride)
    model = add_weight_noise(Hybrid(config))
    assert model.grid == (32 // stride, 64 // stride)
    tokens = model.tokens(torch.randn(1, 3, 32, 64))
    assert tokens.shape == (1, 1 + model.grid[0] * model.grid[1], 16)
    torch.testing.assert_close(model(torch.ones(1, 3, 32, 64)), model.logits(model.tokens(torch.ones(1, 3, 32, 64))))


def test_filters_are_standardized() -> None:
    convolution = add_weight_noise(StdConv2d(3, 8, 3), std=2.0)
    images = torch.randn(2, 3, 9, 9)
    weight = convolution.weight.flatten(1)
    weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True, correction=0)
    expected = F.conv2d(images, weight.view_as(convolution.weight), padding=1)
    torch.testing.assert_close(convolution(images), expected, rtol=1e-4, atol=1e-5)
    convolution.weight.data.mul_(7).add_(1)
    torch.testing.assert_close(convolution(images), expected, rtol=1e-4, atol=1e-4)


@given(size=st.integers(1, 20), kernel=st.integers(1, 7), stride=st.integers(1, 3))
def test_same_padding_gives_size_over_stride(size: int, kernel: int, stride: int) -> None:
    padded = pad_same(torch.ones(1, 1, size, size), kernel, stride)
    assert F.conv2d(padded, torch.ones(1, 1, kernel, kernel), stride=stride).shape[-1] == math.ceil(size / stride)


def test_image_must_be_a_multiple_of_the_stride() -> None:
    with pytest.raises(ConfigError, match=r"40×64 pixels; expected a multiple of 16×16"):
        HybridConfig(image_size=(40, 64))
    with pytest.raises(ConfigError, match=r"stages is \(1, 0\); expected more than 0"):
        HybridConfig(stages=(1, 0))
    with pytest.raises(ConfigError, match=r"stages is 3; expected a list of whole numbers"):
        HybridConfig(stages=3)  # pyright: ignore[reportArgumentType]


def test_dynamic_size() -> None:
    model = add_weight_noise(Hybrid(replace(TOY, dynamic=True)))
    assert model(torch.randn(2, 3, 64, 32)).shape == (2, 5)


def test_half_precision_standardizes_in_float32() -> None:
    convolution, images = StdConv2d(8, 8, 3), torch.randn(1, 8, 9, 9)
    convolution.weight.data.normal_(std=3e-4)
    expected = convolution(images)
    half = convolution.half()(images.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)
