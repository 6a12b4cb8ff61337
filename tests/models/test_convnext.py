"""ConvNeXt: outputs equal to timm, torchvision and transformers; weights by name and back; images of any size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.family_checks import (
    check_preset_is_inferred,
    mark_most_slow,
)
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from timm.models.convnext import ConvNeXt as TimmConvNeXt
from torch import Tensor
from torchvision.models import convnext as torchvision_convnext
from transformers import ConvNextConfig, ConvNextForImageClassification

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.models.convnext import PRESETS, ConvNeXt, ConvNeXtConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = ConvNeXtConfig(image_size=64, stages=(1, 2, 1, 1), widths=(8, 16, 24, 32), classes=5)


def toy(**fields: Any) -> ConvNeXt:
    return add_weight_noise(ConvNeXt(replace(TOY, **fields)), 0.2)


def of_timm(**fields: Any) -> Any:
    sizes: dict[str, Any] = {"depths": (1, 2, 1, 1), "dims": (8, 16, 24, 32), "num_classes": 5}
    return add_weight_noise(TimmConvNeXt(**{**sizes, **fields}), 0.2)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 64)))


@pytest.mark.parametrize("name", mark_most_slow(PRESETS))
def test_presets_have_the_tensors_of_timm(name: str) -> None:
    """In the four smallest, timm stores the matrices of the MLPs as 1×1 convolutions."""
    with torch.device("meta"):
        ours = vitrail.create(name)
        other: Any = timm.create_model(name)
    convolutions = name.endswith(("atto", "femto", "pico", "nano"))
    expected = {
        key: tensor.shape[:2] if convolutions and "mlp" in key and key.endswith("weight") else tensor.shape
        for key, tensor in other.state_dict().items()
    }
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == expected
    assert [level.stride[0] for level in ours.levels] == [each["reduction"] for each in other.feature_info]
    assert [level.width for level in ours.levels] == [each["num_chs"] for each in other.feature_info]
    check_preset_is_inferred(name)


@pytest.mark.parametrize("size", [(64, 64), (75, 46)])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(size: tuple[int, int]) -> None:
    other, ours, x = of_timm(), toy(), images(*size)
    ours.load_state_dict(other.state_dict())
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(x), other.forward_features(x).flatten(2).mT)
    for mine, its in zip(ours.feature_maps(x), other.forward_intermediates(x, intermediates_only=True), strict=True):
        assert (mine - its).abs().max() <= 1e-5


def test_gradients_equal_timm() -> None:
    other, ours, x = of_timm(), toy(), images()
    ours.load_state_dict(other.state_dict())
    for model in (other, ours):
        F.cross_entropy(model.train()(x), torch.arange(2)).backward()
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model: Any = ConvNeXt(replace(TOY, stochastic_depth=0.4, layer_scale=0.5))
    rates = [block.drop_path.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    block = model.stages[3].blocks[0]
    assert block.gamma.unique().tolist() == [0.5]
    assert block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"image of 31×64 pixels; expected at least 32×32"):
        toy()(images(31, 64))
    assert toy()(images(32, 33)).shape == (2, 5)


@pytest.mark.parametrize("name", ["convnext_atto", "convnext_tiny"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_round_trip_of_timms_files(name: str, suffix: str, tmp_path: Path) -> None:
    """The tensors come back as they were, matrices or 1×1 convolutions."""
    other = add_weight_noise(timm.create_model(name, depths=(1, 1, 1, 1), num_classes=5))
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(other.state_dict(), path)
    checkpoint = check_round_trip(path, tmp_path / f"back{suffix}", to="timm")
    assert checkpoint.report.assumed.keys() == {"preprocessing"}
    assert max_output_difference(checkpoint.model, other, (64, 64)) <= 1e-5


def test_folders_of_timm(tmp_path: Path) -> None:
    model = toy(layer_scale=0.1)
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    with pytest.raises(CheckpointError, match=r"number of stages is 2, which timm cannot represent; expected 4"):
        write(toy(stages=(1, 1), widths=(8, 16)), tmp_path / "two", "timm")


def test_files_of_the_authors(tmp_path: Path) -> None:
    other = of_timm()
    names = {"stem": "downsample_layers.0", "conv_dw": "dwconv", "mlp.fc": "pwconv", "blocks.": "", "head.norm": "norm"}
    tensors = dict[str, Tensor]()
    for name, tensor in other.state_dict().items():
        for ours, theirs in {**names, "head.fc": "head"}.items():
            name = name.replace(ours, theirs)
        if "downsample." in name:
            _, stage, _, rest = name.split(".", 3)
            name = f"downsample_layers.{stage}.{rest}"
        tensors[name] = tensor
    assert "stages.1.1.pwconv2.bias" in tensors
    torch.save({"model": tensors}, tmp_path / "convnext.pth")
    assert max_output_difference(read(tmp_path / "convnext.pth").model, other, (64, 64)) <= 1e-5


def test_torchvision(tmp_path: Path) -> None:
    sizes = zip(TOY.widths, (*TOY.widths[1:], None), TOY.stages, strict=True)
    settings = [torchvision_convnext.CNBlockConfig(*each) for each in sizes]
    other: Any = add_weight_noise(torchvision_convnext.ConvNeXt(settings, num_classes=5), 0.2)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    checkpoint = check_round_trip(tmp_path / "weights.pth", tmp_path / "back.pth", to="torchvision")
    assert max_output_difference(checkpoint.model, other, (64, 96)) <= 1e-5
    write(toy(image_size=224, stages=(1, 1, 9, 1), widths=(96, 8, 8, 8)), tmp_path / "tiny.pth", "torchvision")
    preprocessing = read(tmp_path / "tiny.pth").description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.crop, preprocessing.interpolation) == (224 / 236, "bilinear")


def test_transformers(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"depths": [1, 2, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_labels": 5, "image_size": 64}
    other: Any = add_weight_noise(ConvNextForImageClassification(ConvNextConfig(layer_norm_eps=1e-6, **sizes)), 0.2)
    other.save_pretrained(tmp_path / "theirs")
    processor = '{"crop_pct": 0.5, "resample": 3, "size": {"shortest_edge": 64}, "image_mean": [0.4, 0.4, 0.4]}'
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(processor)
    checkpoint = read(tmp_path / "theirs")
    assert (checkpoint.layout, checkpoint.model.config) == ("hf", TOY)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.crop, preprocessing.fit, preprocessing.mean) == (0.5, "short_side", (0.4, 0.4, 0.4))

    def run(x: Tensor) -> Tensor:
        return other(x).logits

    assert max_output_difference(checkpoint.model, run, (64, 64)) <= 1e-5
    write(checkpoint.model, tmp_path / "back", "hf")
    assert_same_tensors(read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "back"))
    other = ConvNextForImageClassification.from_pretrained(tmp_path / "back").eval()
    assert max_output_difference(checkpoint.model, run, (64, 64)) <= 1e-5
    other.convnext.layernorm.eps = 1e-12  # its default, which the weights were not trained with
    assert max_output_difference(checkpoint.model, run, (64, 64)) <= 1e-4


def test_what_is_another_model_is_refused(tmp_path: Path) -> None:
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "convnext_xxlarge.pth": ({}, "convnext_xxlarge has norms with an eps of 1e-5"),
        "convnextv2_tiny.pth": ({"use_grn": True, "ls_init_value": None}, "10 tensors that are not part of a convnext"),
        "convnext_tiny_hnf.pth": ({"head_norm_first": True}, "2 tensors that are not part of a convnext"),
    }
    for name, (fields, message) in refused.items():
        torch.save(of_timm(**fields).state_dict(), tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / name)


def test_other_sizes_patches_and_classes_on_load(tmp_path: Path) -> None:
    write(toy(), tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(48, 64), patch_size=6, classes=3)
    assert loaded.report.resized == {"stem.0.weight": "flexivit kernel"}
    assert loaded.model(images(48, 64)).shape == (2, 3)


def test_layer_decay_levels() -> None:
    weights = {weight.name: weight for weight in list_weights(toy())}
    assert weights["stem.1.weight"].level == 0
    assert [weights[f"stages.1.blocks.{n}.norm.weight"].level for n in range(2)] == [2, 3]
    assert weights["head.norm.weight"].level == 6
    assert not weights["stages.0.blocks.0.gamma"].decays


def test_inspection_has_no_attention() -> None:
    with pytest.raises(ConfigError, match="ConvNeXt has no attention maps: it has no attention; expected"):
        vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=64))


@pytest.mark.slow
def test_export_for_all_sizes(tmp_path: Path) -> None:
    _, check = vitrail.export_model(
        toy(), tmp_path / "shipped", preprocessing=vitrail.Preprocessing(image_size=64), dynamic=True
    )
    assert check.difference <= 1e-4
