"""RegNetY: the paper's widths, outputs and gradients equal to timm, images of any size."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from timm.models.regnet import RegNet, RegNetCfg

from vitrail.models.regnety import PRESETS, RegNetY, RegNetYBlock, config_from_width_rule

TOY = replace(config_from_width_rule(6, 16, 16.0, 2.0, 8), classes=5, image_size=32)
PAPER = {  # blocks and widths per stage, from its tables
    "regnety_040": ((2, 6, 12, 2), (128, 192, 512, 1088)),
    "regnety_080": ((2, 4, 10, 1), (168, 448, 896, 2016)),
    "regnety_120": ((2, 5, 11, 1), (224, 448, 896, 2240)),
    "regnety_160": ((2, 4, 11, 1), (224, 448, 1232, 3024)),
}


def peers() -> tuple[Any, RegNetY]:
    """A toy model of timm and ours with its weights; noise in all weights and running statistics."""
    size = RegNetCfg(depth=6, w0=16, wa=16.0, wm=2.0, group_size=8, se_ratio=0.25)
    theirs = randomize_batch_norms(add_weight_noise(RegNet(size, num_classes=5)))
    ours = RegNetY(TOY)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.eval()


@pytest.mark.parametrize("name", PAPER)
def test_width_rule_gives_the_stages_of_the_paper(name: str) -> None:
    assert (PRESETS[name].stages, PRESETS[name].widths) == PAPER[name]


@pytest.mark.parametrize("size", [(32, 32), (45, 70)])
def test_output_equals_timm(size: tuple[int, int]) -> None:
    theirs, ours = peers()
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        logits, features = theirs(images), theirs.forward_features(images)
        assert logits.std() > 0.01
        assert (ours(images) - logits).abs().max() <= 1e-5
        torch.testing.assert_close(ours.tokens(images), features.flatten(2).transpose(1, 2))
        maps = theirs.forward_intermediates(images, len(ours.levels), intermediates_only=True)
        for mine, other in zip(ours.feature_maps(images), maps, strict=True):
            assert (mine - other).abs().max() <= 1e-5


def test_gradients_and_statistics_equal_timm() -> None:
    theirs, ours = peers()
    images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)
    for model in (theirs, ours):
        F.cross_entropy(model.train()(images), labels).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-6, msg=key)
    for (key, mine), its in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, its, msg=key)


def test_shapes() -> None:
    model = RegNetY(TOY)
    images = torch.randn(4, 3, 64, 64)
    side = 64 // 2 ** (1 + len(TOY.stages))
    assert model.tokens(images).shape == (4, side * side, TOY.widths[-1])
    assert RegNetY(replace(TOY, classes=0))(images).shape == (4, TOY.widths[-1])


def test_initial_weights() -> None:
    """A grouped kernel is scaled by the channels of its group; a block starts as the identity."""
    torch.manual_seed(0)
    block = RegNetY(replace(TOY, widths=(64, 64, 128, 128), group_width=16)).get_submodule("s1.b1")
    assert isinstance(block, RegNetYBlock)
    assert block.conv2.conv.weight.std().item() == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.05)
    assert not block.conv3.bn.weight.any()


def test_images_of_any_size() -> None:
    model = add_weight_noise(RegNetY(TOY))
    for size in ((32, 32), (1, 1), (33, 17), (64, 8)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)
