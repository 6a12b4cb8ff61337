"""MobileViT: outputs equal to timm and transformers, whose images have blue first, any size, maps of four sequences."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.family_checks import (
    check_preset_is_inferred,
    count_parameters,
)
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from torch import Tensor
from transformers import MobileViTConfig as HfConfig
from transformers import MobileViTForImageClassification

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.mobilevit import MobileViT, MobileViTConfig, cut_into_sequences
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = MobileViTConfig(
    image_size=32,
    convolutions=(1, 2, 1),
    stages=(0, 1, 2),
    widths=(8, 16, 24),
    token_widths=(0, 16, 32),
    heads=2,
    expansion=2,
    classes=5,
)
PARAMETERS = {"mobilevit_xxs": 1_272_024, "mobilevit_xs": 2_317_848, "mobilevit_s": 5_578_632}


def toy(**fields: Any) -> MobileViT:
    return randomize_batch_norms(add_weight_noise(MobileViT(replace(TOY, **fields))))


def theirs() -> Any:
    return randomize_batch_norms(add_weight_noise(timm.create_model("mobilevit_xxs", num_classes=5), 0.02))


def their_transformer() -> Any:
    """At the sizes of xxs; its own weights start near 0."""
    sizes: dict[str, Any] = {"hidden_sizes": [64, 80, 96], "neck_hidden_sizes": [16, 16, 24, 48, 64, 80, 320]}
    arguments: dict[str, Any] = {**sizes, "expand_ratio": 2.0, "num_labels": 5}
    config = HfConfig(**arguments)
    other = MobileViTForImageClassification(config)
    for part in other.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(part.weight)
        elif isinstance(part, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(part.weight)
    return randomize_batch_norms(add_weight_noise(other, 0.02))


def images(*size: int) -> Tensor:
    return torch.rand(2, 3, *(size or (32, 32)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_tensors_of_timm(name: str) -> None:
    assert count_parameters(name) == PARAMETERS[name]
    check_preset_is_inferred(name)
    with torch.device("meta"):
        ours, other = vitrail.create(name), timm.create_model(name)
    shapes = [{key: tensor.shape for key, tensor in each.state_dict().items()} for each in (ours, other)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("size", [(64, 64), (72, 104)])  # the last maps of the second have odd sides
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(size: tuple[int, int]) -> None:
    other, x = theirs(), images(*size)
    ours: Any = vitrail.create("mobilevit_xxs", classes=5).eval()
    ours.load_state_dict(other.state_dict())
    expected = other(x)
    assert (ours(x) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    maps = other.forward_intermediates(x, intermediates_only=True, exclude_final_conv=True)
    for mine, its in zip(ours.feature_maps(x), maps, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_gradients_equal_timm() -> None:
    other, x = theirs(), images(64, 64)
    ours: Any = vitrail.create("mobilevit_xxs", classes=5)
    ours.load_state_dict(other.state_dict())
    for model in (other, ours):
        model.train()(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in ours.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-2, atol=1e-3 * scale + 1e-5, msg=name)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    assert toy(classes=0)(images()).shape == (2, 96)


def test_sequences_are_spread_over_the_grid() -> None:
    """As written out: the places of one of the four positions in all squares of 2×2."""
    windows, x = cut_into_sequences((4, 6)), torch.arange(24.0).reshape(1, 24, 1)
    split = windows.split(x)
    assert split[0, :, 0].tolist() == [0, 2, 4, 12, 14, 16]
    assert split[3, :, 0].tolist() == [7, 9, 11, 19, 21, 23]
    assert torch.equal(windows.join(split), x)


@pytest.mark.parametrize("classes", [5, 0])
def test_round_trip_of_timms_files(classes: int, tmp_path: Path) -> None:
    """Pixels are from 0 to 1, without a mean."""
    other = timm.create_model("mobilevit_xxs", num_classes=classes)
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.report.assumed.keys() == {"preprocessing"}
    how = checkpoint.description.preprocessing
    assert how is not None
    assert (how.mean, how.std, how.crop) == ((0, 0, 0), (1, 1, 1), 0.9)


def test_folders_of_timm(tmp_path: Path) -> None:
    model = randomize_batch_norms(add_weight_noise(vitrail.create("mobilevit_xxs", classes=5), 0.02))
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-4
    assert read(tmp_path / "folder").model.config == model.config
    with pytest.raises(CheckpointError, match=r"timm cannot open a folder of a custom mobilevit"):
        write(toy(), tmp_path / "custom", "timm")


@torch.no_grad()
def test_folders_of_transformers(tmp_path: Path) -> None:
    """Its images have blue first, so that the first filters are turned around in both directions."""
    other, x = their_transformer(), images(64, 96)
    other.save_pretrained(tmp_path / "theirs")
    checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf")
    model, expected = checkpoint.model, other(x.flip(1)).logits
    assert (model(x) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert (model(x.flip(1)) - expected).abs().max() > 1e-3
    assert torch.equal(model.get_parameter("stem.conv.weight"), other.mobilevit.conv_stem.convolution.weight.flip(1))
    opened = MobileViTForImageClassification.from_pretrained(tmp_path / "back")
    assert_same_tensors(opened.state_dict(), other.state_dict())


def test_processors_of_transformers(tmp_path: Path) -> None:
    """One that does not turn the channels around has weights for red first."""
    other = their_transformer()
    other.save_pretrained(tmp_path / "theirs")
    card: dict[str, Any] = {"feature_extractor_type": "MobileViTFeatureExtractor", "size": 288, "crop_size": 256}
    kernel = other.mobilevit.conv_stem.convolution.weight
    for flipped in (True, False):
        text = json.dumps({**card, "resample": 2, "do_flip_channel_order": flipped})
        (tmp_path / "theirs" / "preprocessor_config.json").write_text(text)
        checkpoint = read(tmp_path / "theirs")
        found = checkpoint.model.get_parameter("stem.conv.weight")
        assert torch.equal(found, kernel.flip(1) if flipped else kernel)
        how = checkpoint.description.preprocessing
        assert how is not None
        assert (how.fit, how.crop, how.mean, how.std) == ("short_side", 256 / 288, (0, 0, 0), (1, 1, 1))
    write(checkpoint.model, tmp_path / "back", "hf", preprocessing=how)
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert (written["image_processor_type"], written["do_flip_channel_order"]) == ("MobileViTImageProcessor", True)
    assert read(tmp_path / "back").description.preprocessing == how
    with pytest.raises(CheckpointError, match=r"mean is \(0.5, 0.5, 0.5\), which MobileViTImageProcessor cannot repr"):
        write(checkpoint.model, tmp_path / "other", "hf", preprocessing=vitrail.Preprocessing(image_size=256))
    with pytest.raises(CheckpointError, match=r"convolutions is \(1, 2, 1\), which transformers' mobilevit cannot"):
        write(toy(), tmp_path / "custom", "hf")


def test_files_of_the_authors(tmp_path: Path) -> None:
    """Stages are counted from 1, the norm after the last block is one of the blocks, and images have blue first."""
    model = vitrail.create("mobilevit_xxs", classes=5)
    write(model, tmp_path / "mobilevit.pt", "authors")
    tensors = torch.load(tmp_path / "mobilevit.pt")
    assert {"layer_2.2.block.red_1x1.block.norm.running_var", "layer_4.1.global_rep.4.weight"} <= tensors.keys()
    assert {"layer_5.1.global_rep.2.pre_norm_mha.1.qkv_proj.bias", "classifier.fc.weight"} <= tensors.keys()
    assert torch.equal(tensors["conv_1.block.conv.weight"], model.get_parameter("stem.conv.weight").flip(1))
    loaded = read(tmp_path / "mobilevit.pt")
    assert loaded.layout == "authors"
    assert_same_tensors(loaded.model.state_dict(), model.state_dict())


def test_layer_decay_levels() -> None:
    levels = {weight.name: weight.level for weight in list_weights(toy())}
    assert levels["stem.conv.weight"] == 0
    assert levels["stages.1.2.transformer.0.attn.qkv.weight"] == levels["stages.1.2.conv_fusion.conv.weight"] == 4
    assert levels["final_conv.conv.weight"] == levels["head.fc.weight"] == 7


PHOTO = np.random.default_rng(0).random((36, 36, 3))


def test_maps_of_four_sequences() -> None:
    """A place attends to those that have its position in their square of 2×2."""
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=32))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    assert [tuple(each.shape) for each in captured.maps] == [(4, 2, 16, 16), (4, 2, 4, 4), (4, 2, 4, 4)]
    found = subject.explain(PHOTO, "attention", layer=0, token="5,2").map
    row = captured.maps[0][2].mean(0)[2 * 4 + 1]  # an odd row and an even column: the third sequence
    np.testing.assert_allclose(found[1::2, ::2], row.reshape(4, 4), rtol=1e-4)
    assert found[::2].sum() == found[:, 1::2].sum() == 0
    assert subject.explain(PHOTO, "heads", layer=-1).maps.shape == (1, 2, 4, 4)
    changes = "the grid changes from 16×16 to 8×8 between layers 0 and 1"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")
    with pytest.raises(ConfigError, match=r"^method 'norms' needs a model with blocks and a final norm"):
        subject.explain(PHOTO, "norms")
