"""EfficientNet: outputs equal to timm, torchvision, transformers and Google's own, with both paddings."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.family_checks import check_preset_is_inferred, count_parameters
from support.layout_round_trip import check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import randomize_batch_norms
from support.reference_logits import read_reference
from timm.models.efficientnet import _gen_efficientnet  # pyright: ignore[reportPrivateUsage]
from torch import Tensor, nn
from torchvision.models.efficientnet import EfficientNet as TorchvisionNet
from torchvision.models.efficientnet import MBConvConfig
from transformers import EfficientNetConfig as HfConfig
from transformers import EfficientNetForImageClassification

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.models.efficientnet import PRESETS, TENSORFLOW, EfficientNet, EfficientNetConfig, scale_config

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = replace(scale_config(0.25, 0.5, 64), classes=10)
TOY_TENSORFLOW = replace(TOY, **TENSORFLOW)
SIZES = [(64, 64), (65, 65), (45, 70)]
PARAMETERS = {  # with and without the head
    "b0": (5_288_548, 4_007_548),
    "b1": (7_794_184, 6_513_184),
    "b2": (9_109_994, 7_700_994),
    "b3": (12_233_232, 10_696_232),
    "b4": (19_341_616, 17_548_616),
    "b5": (30_389_784, 28_340_784),
    "b6": (43_040_704, 40_735_704),
    "b7": (66_347_960, 63_786_960),
    "b8": (87_413_142, 84_596_142),
    "l2": (480_309_308, 474_804_308),
}


def make_timm_toy(width: float = 0.25, **fields: Any) -> Any:
    factors = {"channel_multiplier": width, "depth_multiplier": 0.5}
    return randomize_batch_norms(_gen_efficientnet("efficientnet_b0", **factors, num_classes=10, **fields).eval())


def make_torchvision_toy(norm: Callable[..., nn.Module] = nn.BatchNorm2d, *, deep: bool = False) -> Any:
    """The toy; deep: with five blocks in the second stage, as from B5 on."""
    settings = [
        MBConvConfig(expansion, kernel, stride, before, width, 10 if deep and width == 24 else depth, 0.25, 0.5)
        for expansion, kernel, stride, before, width, depth in (
            *((1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 3)),
            *((6, 5, 1, 80, 112, 3), (6, 5, 2, 112, 192, 4), (6, 3, 1, 192, 320, 1)),
        )
    ]
    return randomize_batch_norms(
        TorchvisionNet(settings, 0.2, num_classes=10, norm_layer=norm, last_channel=320).eval()
    )


def load_into(config: EfficientNetConfig, tensors: dict[str, Tensor]) -> EfficientNet:
    ours = EfficientNet(config)
    ours.load_state_dict(tensors)
    return ours.eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_inference_from_shapes(name: str) -> None:
    with torch.device("meta"):
        headless = vitrail.create(f"tf_efficientnet_{name}", classes=0)
    counted = count_parameters(f"tf_efficientnet_{name}"), sum(each.numel() for each in headless.parameters())
    assert counted == PARAMETERS[name]
    if f"efficientnet_{name}" in PRESETS:
        check_preset_is_inferred(f"efficientnet_{name}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", ["symmetric", "same"])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(padding: str, size: tuple[int, int]) -> None:
    same = padding == "same"
    theirs = make_timm_toy(bn_eps=1e-3, pad_type="same") if same else make_timm_toy()
    ours, images = load_into(TOY_TENSORFLOW if same else TOY, theirs.state_dict()), torch.randn(2, 3, *size)
    logits = theirs(images)
    assert logits.std() > 0.01
    assert (ours(images) - logits).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(images), theirs.forward_features(images).flatten(2).mT)
    maps = theirs.forward_intermediates(images, intermediates_only=True)
    assert [each.width for each in ours.levels] == [each.shape[1] for each in maps]
    for mine, its in zip(ours.feature_maps(images), maps, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    for level, its in zip(EfficientNet(replace(ours.config, image_size=size)).levels, maps, strict=True):
        assert level.grid == its.shape[2:]


def test_gradients_and_statistics_equal_timm() -> None:
    theirs, images, labels = make_timm_toy(), torch.randn(4, 3, 64, 64), torch.arange(4)
    ours = load_into(TOY, theirs.state_dict())
    for model in (theirs, ours):
        F.cross_entropy(model.train()(images), labels).backward()
    expected = {name: each.grad for name, each in theirs.named_parameters()}
    for name, each in ours.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    for (name, mine), its in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, its, msg=name)


@torch.no_grad()
def test_another_padding_or_epsilon_is_another_model() -> None:
    """Padding differs at even sides alone; a tolerance of 1e-5 shows either."""
    tensors = make_timm_toy(bn_eps=1e-3, pad_type="same").state_dict()
    ours = load_into(TOY_TENSORFLOW, tensors)
    even, odd = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 65, 65)
    symmetric = load_into(replace(TOY_TENSORFLOW, padding="symmetric"), tensors)
    assert (ours(even) - symmetric(even)).abs().max() > 1e-4
    assert torch.equal(ours(odd), symmetric(odd))
    other_eps = load_into(replace(TOY_TENSORFLOW, norm_eps=1e-5), tensors)
    assert (ours(odd) - other_eps(odd)).abs().max() > 5e-5


@torch.no_grad()
def test_output_equals_transformers_at_even_sides_only() -> None:
    """All tensors are in the same order; its padding is that of a list, which is wrong for odd maps.

    Half as wide as B0: at a quarter, stem and first stage have the same width, and theirs has no shortcut there.
    """
    sizes: dict[str, Any] = {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640, "num_labels": 10}
    theirs = EfficientNetForImageClassification(HfConfig(**sizes, image_size=64)).eval()
    tensors = make_timm_toy(0.5).state_dict()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), tensors.values(), strict=True)))
    ours = load_into(replace(scale_config(0.5, 0.5, 64), classes=10, **TENSORFLOW), tensors)
    even, odd = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 65, 65)
    assert (ours(even) - theirs(even).logits).abs().max() <= 1e-5
    assert (ours(odd) - theirs(odd).logits).abs().max() > 1e-4


def rename_from_tensorflow(name: str) -> str:
    """timm's name of a tensor of Google's code, whose blocks are numbered through."""
    parts = {"kernel": "weight", "depthwise_kernel": "weight", "gamma": "weight", "beta": "bias", "bias": "bias"}
    *path, last = name.split("/")
    last = {**parts, "moving_mean": "running_mean", "moving_variance": "running_var"}[last]
    outside = {
        "stem/conv2d": "conv_stem",
        "stem/tpu_batch_normalization": "bn1",
        "head/conv2d": "conv_head",
        "head/tpu_batch_normalization": "bn2",
        "head/dense": "classifier",
    }
    if "/".join(path) in outside:
        return f"{outside['/'.join(path)]}.{last}"
    number, ends = int(path[0].removeprefix("blocks_")), torch.tensor(TOY.stages).cumsum(0)
    stage = int((ends <= number).sum())
    inside = {
        "depthwise_conv2d": "conv_dw",
        "se/conv2d": "se.conv_reduce",
        "se/conv2d_1": "se.conv_expand",
        "conv2d": "conv_pw",
        "conv2d_1": "conv_pwl",
        **{f"tpu_batch_normalization{end}": f"bn{n}" for n, end in enumerate(("", "_1", "_2"), start=1)},
    }
    first = int(ends[stage]) - TOY.stages[stage]
    return f"blocks.{stage}.{number - first}.{inside['/'.join(path[1:])]}.{last}"


@pytest.mark.parametrize("size", [64, 65])
@torch.no_grad()
def test_output_equals_the_authors_code(size: int, shared: Callable[[str], Path]) -> None:
    reference = read_reference(shared, f"efficientnet_tf_{size}")
    tensors = dict[str, Tensor]()
    for name, tensor in reference.tensors.items():
        axes = (2, 3, 0, 1) if name.endswith("depthwise_kernel") else (3, 2, 0, 1)
        arranged = tensor.permute(axes) if tensor.ndim == 4 else tensor.T if tensor.ndim == 2 else tensor
        tensors[rename_from_tensorflow(name)] = arranged
    ours = EfficientNet(TOY_TENSORFLOW).eval()
    missing, unexpected = ours.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    assert (ours(reference.images) - reference.logits).abs().max() <= 2e-5


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_round_trip_of_timms_files(suffix: str, tmp_path: Path) -> None:
    theirs = make_timm_toy()
    path = tmp_path / f"weights{suffix}"
    save_file(theirs.state_dict(), path) if suffix == ".safetensors" else torch.save(theirs.state_dict(), path)
    checkpoint = check_round_trip(path, tmp_path / f"back{suffix}", to="timm")
    assert max_output_difference(checkpoint.model, theirs, (64, 64)) <= 1e-5


@pytest.mark.parametrize("deep", [False, True])
def test_round_trip_of_torchvisions_files(deep: bool, tmp_path: Path) -> None:
    """From B5 on, torchvision has TensorFlow's batch norms, but not its padding."""
    theirs = make_torchvision_toy(
        partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01) if deep else nn.BatchNorm2d, deep=deep
    )
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    checkpoint = check_round_trip(tmp_path / "weights.pth", tmp_path / "back.pth", to="torchvision")
    assert max_output_difference(checkpoint.model, theirs, (64, 64)) <= 1e-5
    theirs.load_state_dict(read_tensors(tmp_path / "back.pth"))
    with pytest.raises(CheckpointError, match="padding is 'same', which torchvision cannot represent"):
        write(EfficientNet(replace(checkpoint.model.config, padding="same")), tmp_path / "same.pth", "torchvision")


@pytest.mark.parametrize("name", ["efficientnet_b0", "efficientnet_b5"])
def test_torchvisions_names_and_crop(name: str, tmp_path: Path) -> None:
    from torchvision.models import get_model, get_model_weights

    weights = next(iter(get_model_weights(name)))
    torch.save(get_model(name).state_dict(), tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth")
    how, transform, norm = checkpoint.description.preprocessing, weights.transforms(), checkpoint.model.bn1
    assert how is not None
    assert checkpoint.layout == "torchvision"
    assert how.crop == pytest.approx(transform.crop_size[0] / transform.resize_size[0])
    assert how.interpolation == transform.interpolation.value
    assert (norm.eps, norm.momentum) == ((1e-3, 0.01) if name == "efficientnet_b5" else (1e-5, 0.1))


def test_timm_opens_a_written_folder(tmp_path: Path) -> None:
    model = randomize_batch_norms(vitrail.create("tf_efficientnet_b0", classes=5)).eval()
    nn.init.normal_(model.classifier.weight, std=0.1)
    write(model, tmp_path / "folder", "timm", preprocessing=vitrail.Preprocessing(image_size=224))
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    with pytest.raises(CheckpointError, match="timm cannot open a folder of a custom efficientnet"):
        write(EfficientNet(TOY), tmp_path / "custom", "timm")


def test_initial_weights_and_rates_are_those_of_timm() -> None:
    """A depthwise filter is scaled by its own size; the rate of a block is that of its number among all."""
    torch.manual_seed(0)
    ours: Any = vitrail.create("efficientnet_b0", stochastic_depth=0.2)
    theirs: Any = timm.create_model("efficientnet_b0", drop_path_rate=0.2)
    for name, tensor in theirs.named_parameters():
        if tensor.numel() > 5000 and not name.startswith("classifier"):
            assert ours.get_parameter(name).std().item() == pytest.approx(tensor.std().item(), rel=0.1), name
    assert ours.blocks[5][0].conv_dw.weight.std().item() == pytest.approx((2 / 25) ** 0.5, rel=0.1)
    pattern, rates = re.compile(r"blocks\.\d+\.\d+\.drop_path"), list[tuple[str, float, float]]()
    others = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        if pattern.fullmatch(name) and ours.get_submodule(name.removesuffix(".drop_path")).adds:
            rates.append((name, module.rate, getattr(others[name], "drop_prob", 0.0)))
    assert len(rates) == 9
    for name, mine, its in rates:
        assert mine == pytest.approx(its), name


def test_images_of_any_size() -> None:
    model = EfficientNet(TOY).eval()
    for size in ((64, 64), (1, 1), (33, 17), (70, 40)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 10)
    assert EfficientNet(replace(TOY, classes=0))(torch.randn(2, 3, 33, 33)).shape == (2, 320)
    assert model.sizes.minimum == (33, 33)
