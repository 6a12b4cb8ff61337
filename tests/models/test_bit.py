"""BiT: outputs equal to timm, transformers and the authors' code, whose constants differ for very small weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.family_checks import check_preset_is_inferred, count_parameters
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from timm.layers.std_conv import StdConv2d as TimmConvolution
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from transformers import BitConfig, BitForImageClassification

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.name_table import convert_to_our_tensors, convert_to_their_tensors
from vitrail.models.bit import PRESETS, SOURCES, BiT, BiTConfig, pool_padded_with_zeros

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = BiTConfig(image_size=64, stages=(1, 2, 1, 1), classes=10)
PARAMETERS = {  # with and without the head
    "resnetv2_50x1_bit": (25_549_352, 23_500_352),
    "resnetv2_50x2_bit": (97_988_712, 93_891_712),
    "resnetv2_50x3_bit": (217_319_080, 211_174_080),
    "resnetv2_101x1_bit": (44_541_480, 42_492_480),
    "resnetv2_101x3_bit": (387_934_888, 381_789_888),
    "resnetv2_152x1_bit": (60_185_128, 58_136_128),
    "resnetv2_152x2_bit": (236_335_208, 232_238_208),
    "resnetv2_152x4_bit": (936_533_224, 928_340_224),
    "resnetv2_200x3_bit": (568_633_000, 562_488_000),
}


def make_timm_toy() -> Any:
    convolution: Any = partial(TimmConvolution, eps=1e-8)
    return add_weight_noise(ResNetV2([1, 2, 1, 1], num_classes=10, stem_type="fixed", conv_layer=convolution), 0.02)


def load_into(config: BiTConfig, timm_tensors: dict[str, Tensor]) -> BiT:
    tensors, unknown = convert_to_our_tensors(timm_tensors, SOURCES[0].table)
    assert not unknown
    ours = BiT(config)
    ours.load_state_dict(tensors)
    return ours.eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_inference_from_shapes(name: str) -> None:
    with torch.device("meta"):
        headless = BiT(replace(PRESETS[name], classes=0))
    assert (count_parameters(name), sum(each.numel() for each in headless.parameters())) == PARAMETERS[name]
    check_preset_is_inferred(name)


def test_parameters_for_imagenet_21k() -> None:
    with torch.device("meta"):
        model = BiT(replace(PRESETS["resnetv2_101x3_bit"], classes=21_843))
    assert sum(each.numel() for each in model.parameters()) == 516_015_123


@pytest.mark.parametrize("size", [(64, 64), (65, 65), (45, 70)])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(size: tuple[int, int]) -> None:
    theirs, images = make_timm_toy(), torch.randn(2, 3, *size)
    ours, logits = load_into(TOY, theirs.state_dict()), theirs(images)
    assert logits.std() > 0.01
    assert (ours(images) - logits).abs().max() <= 1e-5
    features = theirs.forward_features(images).flatten(2).mT
    torch.testing.assert_close(ours.tokens(images), features, rtol=1e-4, atol=1e-4)
    its = theirs.stem(images)
    for mine, stage in zip(ours.feature_maps(images), theirs.stages, strict=True):
        its = stage(its)
        assert (mine - its).abs().max() <= 1e-5 * its.abs().max()


def test_gradients_equal_timm() -> None:
    theirs, images, labels = make_timm_toy(), torch.randn(4, 3, 64, 64), torch.arange(4)
    ours = load_into(TOY, theirs.state_dict())
    for model in (theirs, ours):
        F.cross_entropy(model.train()(images), labels).backward()
    expected, _ = convert_to_our_tensors(
        {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}, SOURCES[0].table
    )
    for name, each in ours.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@torch.no_grad()
def test_output_equals_transformers() -> None:
    config: Any = BitConfig(depths=[1, 2, 1, 1], layer_type="preactivation", num_labels=10)  # pyright: ignore[reportCallIssue]
    theirs, tensors = BitForImageClassification(config).eval(), make_timm_toy().state_dict()
    renamed = {
        name.replace("stem.conv", "bit.embedder.convolution")
        .replace("stages.", "bit.encoder.stages.")
        .replace(".blocks.", ".layers.")
        .replace("head.fc", "classifier.1"): tensor
        for name, tensor in tensors.items()
    }
    renamed = {f"bit.{name}" if name.startswith("norm.") else name: tensor for name, tensor in renamed.items()}
    renamed["classifier.1.weight"] = renamed["classifier.1.weight"].flatten(1)
    theirs.load_state_dict(renamed)
    ours, images = load_into(TOY, tensors), torch.randn(2, 3, 64, 64)
    assert (ours(images) - theirs(images).logits).abs().max() <= 1e-5


AUTHORS = {"root.conv.weight": "stem.conv.weight", "head.gn": "norm", "head.conv": "head.fc"}


def rename_from_authors(name: str) -> str:
    """timm's name of a tensor of the authors' PyTorch code."""
    if name.startswith("body."):
        _, block, unit, *rest = name.split(".")
        part = ".".join(rest).replace("gn", "norm").replace("downsample", "downsample.conv")
        return f"stages.{int(block.removeprefix('block')) - 1}.blocks.{int(unit.removeprefix('unit')) - 1}.{part}"
    for theirs, ours in AUTHORS.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("size", [64, 65])
@torch.no_grad()
def test_output_equals_the_authors_code(size: int, shared: Callable[[str], Path]) -> None:
    reference = read_reference(shared, f"bit_v2_{size}")
    tensors = {rename_from_authors(name): tensor for name, tensor in reference.tensors.items()}
    ours = load_into(replace(TOY, constants="google"), tensors)
    assert (ours(reference.images) - reference.logits).abs().max() <= 2e-5


@torch.no_grad()
def test_constants_differ_for_very_small_weights() -> None:
    tensors, images = make_timm_toy().state_dict(), torch.randn(2, 3, 64, 64)
    small = {name: each / 100 if "conv" in name else each for name, each in tensors.items()}

    def measure_difference(tensors: dict[str, Tensor]) -> float:
        ours = load_into(TOY, tensors)(images), load_into(replace(TOY, constants="google"), tensors)(images)
        return (ours[0] - ours[1]).abs().max().item()

    assert measure_difference(tensors) <= 1e-4
    assert measure_difference(small) > 1e-2


@pytest.mark.parametrize("size", [(8, 8), (9, 6), (1, 1)])
def test_the_pool_counts_the_zeros_around_the_map(size: tuple[int, int]) -> None:
    """Without them, as in a later code of the authors, it is another model."""
    x = -torch.rand(2, 3, *size)
    pooled = pool_padded_with_zeros(x)
    assert torch.equal(pooled, F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2))
    assert not torch.equal(pooled, F.max_pool2d(x, 3, 2, 1))


def test_round_trip_of_timms_files(tmp_path: Path) -> None:
    theirs = make_timm_toy()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.description.family == "bit"
    assert max_output_difference(checkpoint.model, theirs, (64, 64)) <= 1e-5


def test_round_trip_of_googles_files(tmp_path: Path) -> None:
    """Their names count from 1, with two digits; some files number their convolutions."""
    model = add_weight_noise(BiT(BiTConfig(image_size=32, stages=(1, 11), width=32, classes=5, constants="google")))
    arrays: dict[str, Any] = {
        name: tensor.numpy()
        for name, tensor in convert_to_their_tensors(model.state_dict(), SOURCES[1].table, heads=1).items()
    }
    assert arrays["resnet/root_block/standardized_conv2d/kernel"].shape == (7, 7, 3, 32)
    assert arrays["resnet/head/conv2d/kernel"].shape == (1, 1, 256, 5)
    assert "resnet/block2/unit11/c/group_norm/gamma" in arrays
    assert "resnet/block1/unit01/a/proj/standardized_conv2d/kernel" in arrays
    np.savez(tmp_path / "BiT.npz", **arrays)
    checkpoint = check_round_trip(tmp_path / "BiT.npz", tmp_path / "back.npz", to="google")
    assert checkpoint.model.config == replace(model.config, image_size=(224, 224))
    assert_same_tensors(checkpoint.model.state_dict(), model.state_dict())
    how = checkpoint.description.preprocessing
    assert how is not None
    assert (how.mean[0], how.crop, how.interpolation) == (0.5, 0.875, "bilinear")
    numbered: dict[str, Any] = {
        name.replace("c/standardized_conv2d/", "c/standardized_conv2d_3/"): each for name, each in arrays.items()
    }
    np.savez(tmp_path / "numbered.npz", **numbered)
    assert_same_tensors(read(tmp_path / "numbered.npz").model.state_dict(), model.state_dict())
    with pytest.warns(UserWarning, match="google cannot store constants='timm', and its readers use 'google'"):
        write(BiT(replace(TOY, image_size=224, stages=(1, 1), width=32)), tmp_path / "timm.npz", "google")


def test_timm_opens_a_written_folder(tmp_path: Path) -> None:
    model: Any = vitrail.create("resnetv2_50x1_bit", classes=5)
    nn.init.normal_(model.head["fc"].weight, std=0.005)
    write(model.eval(), tmp_path / "folder", "timm", preprocessing=vitrail.Preprocessing(image_size=224))
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    with pytest.raises(CheckpointError, match="timm cannot open a folder of a custom bit"):
        write(BiT(TOY), tmp_path / "custom", "timm")
