"""PVTv2: outputs equal to timm and transformers at any size, weights by name and back, inspection, errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from torch import Tensor
from transformers import PvtV2Config, PvtV2ForImageClassification, PvtV2Model

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.config_from_shapes import infer_config
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.catalog.families import find_preset
from vitrail.models.pvt_v2 import PVTv2, PVTv2Config
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = PVTv2Config(
    image_size=64, stages=(2, 1), widths=(16, 32), heads=(2, 4), reductions=(2, 1), mlp_ratios=(2.0, 3.0), classes=5
)
TIMM: dict[str, Any] = {
    "embed_dims": (16, 32),
    "num_heads": (2, 4),
    "depths": (2, 1),
    "sr_ratios": (2, 1),
    "mlp_ratios": (2, 3),
}
PARAMETERS = {"pvt_v2_b0": 3_666_760, "pvt_v2_b5": 81_956_008}


def toy(**fields: Any) -> PVTv2:
    return add_weight_noise(PVTv2(replace(TOY, **fields)))


def theirs(*, pooled: bool = False) -> Any:
    return add_weight_noise(PyramidVisionTransformerV2(**TIMM, num_classes=5, linear=pooled))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 64)))


@pytest.mark.parametrize("name", vitrail.list_models("pvt_v2*"))
def test_parameters_and_tensors_of_timm(name: str) -> None:
    with torch.device("meta"):
        ours, other = vitrail.create(name), timm.create_model(name)
    shapes = [{key: tensor.shape for key, tensor in each.state_dict().items()} for each in (ours, other)]
    assert shapes[0] == shapes[1]
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == PARAMETERS.get(name, count)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (50, 39)])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(pooled: bool, size: tuple[int, int]) -> None:
    """Maps are after the norm of each stage, as in timm."""
    other, ours, x = theirs(pooled=pooled), toy(pooled=pooled), images(*size)
    ours.load_state_dict(other.state_dict())
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    for mine, its in zip(ours.feature_maps(x), other.forward_intermediates(x, intermediates_only=True), strict=True):
        assert (mine - its).abs().max() <= 1e-5


def test_gradients_equal_timm() -> None:
    other, ours, x = theirs(), toy(), images()
    ours.load_state_dict(other.state_dict())
    for model in (other, ours):
        model.train()(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model: Any = PVTv2(replace(TOY, stochastic_depth=0.4))
    rates = [block.drop_path.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.2, 0.4])


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a grid of 1×16 tokens; expected at least 2×2, which become one key"):
        toy()(images(4, 64))


@pytest.mark.parametrize("name", ["pvt_v2_b0", "pvt_v2_b2_li"])
def test_round_trip_of_timms_files(name: str, tmp_path: Path) -> None:
    other = add_weight_noise(timm.create_model(name, depths=(1, 1, 1, 1), num_classes=5))
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.report.assumed.keys() == {"preprocessing"}
    assert max_output_difference(checkpoint.model, other, (96, 64)) <= 1e-5


def test_folders_of_timm(tmp_path: Path) -> None:
    model = toy()
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    torch.save(model.state_dict(), tmp_path / "file.pth")
    assert torch.equal(read(tmp_path / "file.pth", heads=(2, 4)).model(images() * 0), model(images() * 0))
    with pytest.raises(CheckpointError, match=r"does not specify the heads for widths \(16, 32\); expected heads"):
        read(tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"stride is 2, which timm cannot represent; expected 4"):
        write(toy(stride=2), tmp_path / "other", "timm")


def test_layer_decay_levels() -> None:
    levels = {weight.name: weight.level for weight in list_weights(toy())}
    assert levels["patch_embed.proj.weight"] == 0
    assert levels["stages.1.downsample.proj.weight"] == levels["stages.0.norm.weight"] == 3
    assert levels["stages.1.norm.weight"] == levels["head.weight"] == 4


PHOTO = np.random.default_rng(0).random((70, 70, 3))


@pytest.mark.parametrize("pooled", [False, True])
def test_maps_of_fewer_keys(pooled: bool) -> None:
    model = toy(pooled=pooled)
    subject = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=64))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    keys = 49 if pooled else 64
    assert [tuple(each.shape) for each in captured.maps] == [*[(1, 2, 256, keys)] * 2, (1, 4, 64, keys)]
    found = subject.explain(PHOTO, "attention", layer=0, token="8,3").map
    side = 7 if pooled else 8
    np.testing.assert_allclose(found, captured.maps[0][0].mean(0)[8 * 16 + 3].reshape(side, side), rtol=1e-4)
    changes = "the grid changes from 16×16 to 8×8 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'grad-rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "grad-rollout")
    photos = [np.random.default_rng(n).random((70, 70, 3)) for n in range(4)]
    figures = vitrail.look(subject, photos)
    assert {each.name for each in figures.figures} >= {"filters", "attention_distance", "alignment", "patch_pca"}


def of_transformers(*, pooled: bool) -> Any:
    sizes: dict[str, Any] = {"hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "depths": [2, 1]}
    sizes |= {"sr_ratios": [2, 1], "mlp_ratios": [2, 3], "patch_sizes": [7, 3], "strides": [4, 2], "num_labels": 5}
    config = PvtV2Config(**sizes, num_encoder_blocks=2, image_size=64, linear_attention=pooled)
    return add_weight_noise(PvtV2ForImageClassification(config))


@pytest.mark.parametrize("pooled", [False, True], ids=["reduced", "pooled"])
@torch.no_grad()
def test_folders_of_transformers(pooled: bool, tmp_path: Path) -> None:
    """Its norms of embeddings and keys have an epsilon of 1e-6, where the authors and timm have 1e-5."""
    other, x = of_transformers(pooled=pooled), images(64, 96)
    other.save_pretrained(tmp_path / "theirs")
    checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf")
    assert checkpoint.model.config == replace(TOY, pooled=pooled)
    opened = PvtV2ForImageClassification.from_pretrained(tmp_path / "back")
    assert_same_tensors(opened.state_dict(), other.state_dict())
    assert opened.config.sr_ratios == list(checkpoint.model.config.reductions)
    for name, module in other.named_modules():
        if name.endswith(("patch_embedding.layer_norm", "attention.layer_norm")):
            assert module.eps == 1e-6
            module.eps = 1e-5
    assert max_output_difference(checkpoint.model, lambda x: other(x).logits, (64, 96)) <= 1e-5
    maps = other(x, output_hidden_states=True).hidden_states
    for mine, its in zip(checkpoint.model.feature_maps(x), maps, strict=True):
        assert (mine - its).abs().max() <= 1e-5


def test_models_without_a_head_and_odd_mlps_in_transformers(tmp_path: Path) -> None:
    write(toy(classes=0), tmp_path / "headless", "hf")
    assert_same_tensors(
        PvtV2Model.from_pretrained(tmp_path / "headless").state_dict(), read_tensors(tmp_path / "headless")
    )
    assert read(tmp_path / "headless").model.config == replace(TOY, classes=0)
    with pytest.raises(CheckpointError, match=r"mlp_ratios is \(2.5, 3.0\), which transformers cannot represent"):
        write(toy(mlp_ratios=(2.5, 3.0)), tmp_path / "odd", "hf")


def test_given_heads_are_used_for_published_widths() -> None:
    with torch.device("meta"):
        tensors = vitrail.create("pvt_v2_b0").state_dict()
    family, _ = find_preset("pvt_v2_b0")
    assert infer_config(tensors, family, {}).config["heads"] == (1, 2, 5, 8)
    assert infer_config(tensors, family, {"heads": (2, 4, 5, 8)}).config["heads"] == (2, 4, 5, 8)
