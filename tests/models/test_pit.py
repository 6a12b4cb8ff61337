"""PiT: outputs equal to timm, grids by stage, other sizes, weights by name and back, inspection stage by stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise
from timm.models import save_for_hf
from timm.models.pit import PoolingVisionTransformer
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.pit import PiT, PiTConfig
from vitrail.report.model_report import build_model_report
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = PiTConfig(
    image_size=28, patch_size=4, stride=2, stages=(1, 2, 1), widths=(16, 32, 64), heads=(2, 4, 4), classes=5
)
ARGUMENTS: dict[str, Any] = {
    "img_size": 28,
    "patch_size": 4,
    "stride": 2,
    "base_dims": [8, 8, 16],
    "depth": [1, 2, 1],
    "heads": [2, 4, 4],
}
PARAMETERS = {  # of the authors' code; the second number is of the distilled model
    "ti": (4_847_272, 5_104_336),
    "xs": (10_618_888, 11_003_984),
    "s": (23_461_912, 24_039_056),
    "b": (73_764_840, 74_790_096),
}


def toy(**fields: Any) -> PiT:
    return add_weight_noise(PiT(replace(TOY, **fields)))


def theirs(**fields: Any) -> Any:
    arguments: dict[str, Any] = {**ARGUMENTS, "num_classes": 5, **fields}
    return add_weight_noise(PoolingVisionTransformer(**arguments))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (28, 28)))


@pytest.mark.parametrize("size", PARAMETERS)
def test_parameters_and_grids(size: str) -> None:
    for name, expected in zip((f"pit_{size}_224", f"pit_{size}_distilled_224"), PARAMETERS[size], strict=True):
        with torch.device("meta"):
            model: Any = vitrail.create(name)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected
        sides = (31, 16, 8) if size == "b" else (27, 14, 7)
        assert [level.grid for level in model.levels] == [(side, side) for side in sides]


@pytest.mark.parametrize("distilled", [False, True])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(distilled: bool) -> None:
    other, ours = theirs(distilled=distilled), toy(distilled=distilled)
    ours.load_state_dict(other.state_dict())
    x = images()
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(x)[:, : ours.prefix], other.forward_features(x))
    maps = other.forward_intermediates(x, intermediates_only=True)
    for mine, its in zip(ours.feature_maps(x), maps, strict=True):
        assert (mine - its).abs().max() <= 1e-5


def test_gradients_equal_timm() -> None:
    other, ours = theirs(distilled=True), toy(distilled=True)
    ours.load_state_dict(other.state_dict())
    x = images()
    for model in (other, ours):
        model.train()(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_strides_are_those_measured_and_not_those_of_timm() -> None:
    """Of images that are larger by 8·s pixels, the map of a level of stride s is larger by 8 places."""
    model = toy(dynamic=True)
    for number, level in enumerate(model.levels):
        (stride, _), small = level.stride, model.feature_maps(images())[number]
        larger = model.feature_maps(images(28 + 8 * stride, 28))[number]
        assert (larger.shape[2] - small.shape[2], stride) == (8, 2 * 2**number)
    assert [each["reduction"] for each in theirs().feature_info] == [1, 2, 4]  # timm: (stride − 1)·2^number


def test_initial_weights_and_rates() -> None:
    torch.manual_seed(0)
    model: Any = PiT(replace(TOY, stochastic_depth=0.4, distilled=True))
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    rates = [block.drop_path.rate for stage in model.transformers for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])  # of the authors: i/n, not i/(n − 1)


@pytest.mark.parametrize("answer", ["both", "class", "distill"])
@torch.no_grad()
def test_answers_of_a_distilled_model(answer: Any) -> None:
    model, x = toy(distilled=True, answer=answer), images()
    first, second = model.head_logits(model.tokens(x))
    expected = {"both": (first + second) / 2, "class": first, "distill": second}
    torch.testing.assert_close(model(x), expected[answer])
    assert toy(distilled=True, classes=0)(x).shape == (2, 64)


def test_other_sizes(tmp_path: Path) -> None:
    """A loaded model of another size computes the same as a dynamic one, whose table is resampled in each pass."""
    model = toy()
    write(model, tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(40, 32), classes=3)
    assert loaded.report.resized == {"pos_embed": "timm positions, 13×13 to 19×15"}
    assert [level.grid for level in loaded.model.levels] == [(19, 15), (10, 8), (5, 4)]
    dynamic, x = toy(dynamic=True), images(40, 32)
    dynamic.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.model.tokens(x), dynamic.tokens(x))
    with pytest.raises(ConfigError, match=r"40×32 pixels; expected 28×28, which the model was built for"):
        model(x)
    with pytest.raises(ConfigError, match=r"2×28 pixels; expected a multiple of 2 of at least 4: .* to 4×28"):
        dynamic(images(2, 28))


@pytest.mark.parametrize("fields", [{}, {"distilled": True}, {"num_classes": 0}], ids=["plain", "distilled", "no head"])
def test_round_trip_of_timms_files(fields: dict[str, Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"depth": [1, 1, 1], "num_classes": 5, **fields}
    other = add_weight_noise(timm.create_model("pit_ti_224", **arguments))
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.model.config.heads == (2, 4, 8)  # of the published model of these widths
    assert checkpoint.report.assumed.keys() == {"preprocessing"}
    assert max_output_difference(checkpoint.model, other, (224, 224)) <= 1e-5


def test_files_of_the_authors(tmp_path: Path) -> None:
    """Their pools are next to the stages."""
    model = toy()
    tensors = {
        name.replace("transformers.1.pool", "pools.0").replace("transformers.2.pool", "pools.1"): tensor
        for name, tensor in model.state_dict().items()
    }
    assert "pools.1.conv.weight" in tensors
    torch.save(tensors, tmp_path / "pit.pth")
    x = images()
    assert torch.equal(read(tmp_path / "pit.pth", heads=(2, 4, 4)).model(x), model(x))
    with pytest.raises(CheckpointError, match=r"does not specify the heads for widths \(16, 32, 64\); expected heads"):
        read(tmp_path / "pit.pth")


def test_folders_of_timm(tmp_path: Path) -> None:
    model = toy(distilled=True, mlp_ratio=2.0)
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (28, 28)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    other = timm.create_model("pit_s_224", **ARGUMENTS)
    save_for_hf(other, str(tmp_path / "hub"), model_args=ARGUMENTS, safe_serialization=True)
    assert read(tmp_path / "hub").model.config.heads == (2, 4, 4)


def test_layer_decay_levels() -> None:
    """A pool belongs to the block after it."""
    levels = {weight.name: weight.level for weight in list_weights(toy())}
    assert [levels[f"transformers.{n}.blocks.0.norm1.weight"] for n in range(3)] == [1, 2, 4]
    assert [levels[f"transformers.{n}.pool.conv.weight"] for n in (1, 2)] == [2, 4]
    assert levels["patch_embed.conv.weight"] == levels["cls_token"] == 0
    assert levels["norm.weight"] == levels["head.weight"] == 5


def explainer(**fields: Any) -> vitrail.Explainer:
    return vitrail.Explainer(toy(**fields), preprocessing=vitrail.Preprocessing(image_size=28))


PHOTO = np.random.default_rng(0).random((30, 30, 3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_class_maps_of_each_stage(dynamic: bool) -> None:
    subject = explainer(dynamic=dynamic)
    assert subject.default_method == "attention"
    x = subject.loaded.make_batch([PHOTO])
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(x)
    assert [captured.grids[layer] for layer in range(4)] == [(13, 13), (7, 7), (7, 7), (4, 4)]
    for layer, side in enumerate((13, 7, 7, 4)):
        found = subject.explain(PHOTO, "attention", layer=layer, token="class")
        row = captured.maps[layer][0].mean(0)[0, 1:]
        np.testing.assert_allclose(found.map, (row / row.sum()).reshape(side, side), rtol=1e-4)
        assert subject.explain(PHOTO, "heads", layer=layer).maps.shape == (1, len(captured.maps[layer][0]), side, side)
        assert subject.explain(PHOTO, "norms", layer=layer).maps.shape == (1, 1, side, side)
        assert subject.explain(PHOTO, "attention", layer=layer, token=f"{side - 1},0").map.shape == (side, side)
        with pytest.raises(ConfigError, match=rf"token is '{side},0'; expected .* to {side - 1},{side - 1}"):
            subject.explain(PHOTO, "attention", layer=layer, token=f"{side},0")


def test_rollout_is_refused_with_the_reason() -> None:
    changes = "the grid changes from 13×13 to 7×7 between layers 0 and 1"
    for method in ("rollout", "grad-rollout"):
        with pytest.raises(ConfigError, match=f"^method '{method}' is undefined for this model: {changes}; use 'att"):
            explainer().explain(PHOTO, method)
    with pytest.raises(ConfigError, match=f"^layer 'all' is undefined for this model: {changes}; use the number of"):
        explainer().explain(PHOTO, "attention", layer="all")


def test_figures_and_report() -> None:
    photos = [np.random.default_rng(n).random((30, 30, 3)) for n in range(4)]
    subject = explainer(distilled=True)
    figures = vitrail.look(subject, photos)
    assert {each.name for each in figures.figures} == {
        *("position_similarity", "filters", "attention_distance", "token_similarity", "alignment", "occlusion"),
        "patch_pca",
    }
    changes = "the grid changes from 13×13 to 7×7 between layers 0 and 1"
    assert figures.notes == (f"token norms: layers cannot be compared, since {changes}",)
    distances = figures["attention_distance"].arrays["distances"]
    assert np.isnan(distances).tolist() == [[False, False, True, True], *[[False] * 4] * 3]
    figures["attention_distance"].draw()
    _, _, sections = build_model_report(subject, "pyramid")
    table = next(section.table for section in sections if section.title == "Model")
    assert table is not None
    assert ("attention layers and heads", "4, 2 to 4 each") in table[1]
