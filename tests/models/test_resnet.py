"""ResNet: counts, outputs and gradients equal to timm, the paper's networks for CIFAR, images of any size."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.models.resnet import PRESETS, PaddedShortcut, ResNet, ResNetConfig

TOY = ResNetConfig(image_size=32, stages=(1, 2), width=8, classes=5)
KINDS = {
    "bottleneck": TOY,
    "basic": replace(TOY, block="basic"),
    "cifar": replace(TOY, block="basic", stem="cifar", shortcut="padding"),
    "padded bottlenecks": replace(TOY, stem="cifar", shortcut="padding"),
}


def peers(name: str) -> tuple[Any, ResNet]:
    """A toy model of timm and ours with its weights; noise in all weights and running statistics."""
    theirs = randomize_batch_norms(add_weight_noise(timm.create_model(name, layers=(1, 2, 1, 1), num_classes=5)))
    ours = ResNet(replace(PRESETS[name], stages=(1, 2, 1, 1), classes=5))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.eval()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("size", [(32, 32), (45, 70)])
def test_output_equals_timm(name: str, size: tuple[int, int]) -> None:
    theirs, ours = peers(name)
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        logits, features = theirs(images), theirs.forward_features(images)
        assert logits.std() > 0.01
        assert (ours(images) - logits).abs().max() <= 1e-5
        torch.testing.assert_close(ours.tokens(images), features.flatten(2).transpose(1, 2))
        maps = theirs.forward_intermediates(images, len(ours.levels), intermediates_only=True)
        for mine, other in zip(ours.feature_maps(images), maps, strict=True):
            assert (mine - other).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_gradients_and_statistics_equal_timm(name: str) -> None:
    theirs, ours = peers(name)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for model in (theirs, ours):
        F.cross_entropy(model.train()(images), labels).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-6, msg=key)
    for (key, mine), its in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, its, msg=key)


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (56, 853_018)])
def test_cifar_networks_have_the_counts_of_the_paper(depth: int, parameters: int) -> None:
    n = (depth - 2) // 6
    kernels = 3 * 16 + (2 * n) * 16 * 16 + 16 * 32 + (2 * n - 1) * 32 * 32 + 32 * 64 + (2 * n - 1) * 64 * 64
    norms = 2 * (16 + 2 * n * (16 + 32 + 64))
    assert 9 * kernels + norms + 64 * 10 + 10 == parameters
    assert sum(each.numel() for each in vitrail.create(f"ResNet-{depth}").parameters()) == parameters


class Published(nn.Module):
    """The paper's option A, as in akamaster's code."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.planes = planes

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.planes // 4, self.planes // 4), "constant", 0)


def test_padded_shortcut_has_zeros_on_both_sides() -> None:
    x = torch.randn(2, 16, 9, 8)
    assert torch.equal(PaddedShortcut(16, 2)(x), Published(32)(x))
    assert PaddedShortcut(3, 1)(x).shape == (2, 19, 9, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: str) -> None:
    model = ResNet(KINDS[kind])
    images = torch.randn(4, 3, 32, 32)
    width = 16 if KINDS[kind].block == "basic" else 64
    places = 16 * 16 if KINDS[kind].stem == "cifar" else 4 * 4
    assert model.tokens(images).shape == (4, places, width)
    assert ResNet(replace(KINDS[kind], classes=0))(images).shape == (4, width)


def test_initial_blocks_are_their_shortcuts() -> None:
    """The last norm of each block starts at zero, so that a block starts as its shortcut."""
    block = ResNet(replace(TOY, block="basic")).layer1
    assert isinstance(block, nn.Sequential)
    x = torch.rand(2, 8, 4, 4)
    assert torch.equal(block(x), x)


def test_images_of_any_size() -> None:
    model = add_weight_noise(ResNet(TOY))
    for size in ((32, 32), (1, 1), (33, 17), (64, 8)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)
    with pytest.raises(ConfigError, match=r"input of shape \(1, 1, 8, 8\); expected \(batch, 3, 32, 32\)"):
        model(torch.randn(1, 1, 8, 8))
