"""Twins-SVT: outputs equal to timm, padding that no token attends to, weights by name and back, inspection."""

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
from timm.models.twins import Twins as TimmTwins
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.layers.attention import SelfAttention
from vitrail.models.parts.windows import MaskedWindowAttention
from vitrail.models.twins import Twins, TwinsConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = TwinsConfig(
    image_size=56,
    patch_size=4,
    stages=(2, 3),
    widths=(16, 32),
    heads=(2, 4),
    windows=(7, 7),
    reductions=(2, 1),
    classes=5,
)
TIMM: dict[str, Any] = {
    "img_size": 56,
    "embed_dims": (16, 32),
    "num_heads": (2, 4),
    "depths": (2, 3),
    "sr_ratios": (2, 1),
    "wss": (7, 7),
    "mlp_ratios": (4, 4),
}
PARAMETERS = {"twins_svt_small": 24_060_776, "twins_svt_base": 56_070_952, "twins_svt_large": 99_271_400}


def toy(**fields: Any) -> Twins:
    return add_weight_noise(Twins(replace(TOY, **fields)))


def theirs() -> Any:
    return add_weight_noise(TimmTwins(**TIMM, num_classes=5))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (56, 56)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_tensors_of_timm(name: str) -> None:
    with torch.device("meta"):
        ours, other = vitrail.create(name), timm.create_model(name)
    assert sum(parameter.numel() for parameter in ours.parameters()) == PARAMETERS[name]
    shapes = [{key: tensor.shape for key, tensor in each.state_dict().items()} for each in (ours, other)]
    assert shapes[0] == shapes[1]


@torch.no_grad()
def test_output_and_feature_maps_equal_timm() -> None:
    other, ours, x = theirs(), toy(), images()
    ours.load_state_dict(other.state_dict())
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(x), other.forward_features(x), rtol=1e-5, atol=1e-5)
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


@torch.no_grad()
def test_padded_windows_equal_whole_windows_of_the_tokens_alone() -> None:
    """Of a grid of 5×7 in windows of 4×4, the last window has 1×3 tokens, which attend to each other only."""
    layer = add_weight_noise(MaskedWindowAttention(8, 2, (4, 4)), std=0.5)
    plain = SelfAttention(8, 2)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 7, 8)
    found = layer(x.flatten(1, 2), (5, 7)).unflatten(1, (5, 7))
    for rows in (slice(0, 4), slice(4, 5)):
        for columns in (slice(0, 4), slice(4, 7)):
            part = x[:, rows, columns]
            torch.testing.assert_close(found[:, rows, columns].flatten(1, 2), plain(part.flatten(1, 2)))


@torch.no_grad()
def test_timm_attends_to_padding() -> None:
    """Equal where windows are whole; elsewhere its outputs differ."""
    other, ours = theirs(), toy()
    ours.load_state_dict(other.state_dict())
    assert 1e-5 < max_output_difference(ours, other, (64, 64)) < 0.1
    assert max_output_difference(ours, other, (112, 56)) <= 1e-5


def test_initial_weights_and_rates() -> None:
    torch.manual_seed(0)
    model: Any = Twins(replace(TOY, stochastic_depth=0.4))
    rates = [block.drop_path.rate for blocks in model.blocks for block in blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert model.blocks[1][0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.pos_block[1].proj[0].weight.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.1)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"60×56 pixels; expected a multiple of 8×8"):
        toy()(images(60, 56))
    with pytest.raises(ConfigError, match=r"a grid of 2×2 tokens; expected at least 4×4, which become one key"):
        toy(reductions=(4, 1))(images(8, 8))


def test_round_trip_of_timms_files(tmp_path: Path) -> None:
    other = add_weight_noise(timm.create_model("twins_svt_small", depths=(1, 2, 1, 2), num_classes=5))
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.model.config.heads == (2, 4, 8, 16)  # of the published model of these widths
    assert checkpoint.report.assumed.keys() == {"preprocessing", "windows"}
    assert checkpoint.model.config.reductions == (1, 4, 1, 1)  # a stage of one block has no reduction
    assert max_output_difference(checkpoint.model, other, (224, 224)) <= 1e-5
    resized = read(tmp_path / "weights.safetensors", image_size=(64, 96), classes=3)
    assert not resized.report.resized  # it has no positions
    assert resized.model(images(64, 96)).shape == (2, 3)


def test_folders_of_timm(tmp_path: Path) -> None:
    model = toy()
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (56, 56)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    torch.save(model.state_dict(), tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"does not specify the heads for widths \(16, 32\); expected heads"):
        read(tmp_path / "file.pth")


def test_layer_decay_levels() -> None:
    levels = {weight.name: weight.level for weight in list_weights(toy())}
    assert {levels[name] for name in ("patch_embeds.1.proj.weight", "pos_block.1.proj.0.weight")} == {0}
    assert [levels[f"blocks.1.{n}.norm1.weight"] for n in range(3)] == [3, 4, 5]
    assert levels["norm.weight"] == 6


PHOTO = np.random.default_rng(0).random((60, 60, 3))


def explainer(**fields: Any) -> vitrail.Explainer:
    return vitrail.Explainer(toy(**fields), preprocessing=vitrail.Preprocessing(image_size=56))


def test_maps_of_windows_and_of_fewer_keys() -> None:
    subject = explainer()
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    shapes = [(4, 2, 49, 49), (1, 2, 196, 49), (1, 4, 49, 49), (1, 4, 49, 49), (1, 4, 49, 49)]
    assert [tuple(each.shape) for each in captured.maps] == shapes
    for weights in captured.maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    near = subject.explain(PHOTO, "attention", layer=0, token="8,3").map
    assert np.array_equal(near > 0, np.pad(np.ones((7, 7), bool), ((7, 0), (0, 7))))
    far = subject.explain(PHOTO, "attention", layer=1, token="8,3").map
    expected = captured.maps[1][0].mean(0)[8 * 14 + 3].reshape(7, 7)
    np.testing.assert_allclose(far, expected, rtol=1e-4)
    assert subject.explain(PHOTO, "heads", layer=1).maps.shape == (1, 2, 7, 7)
    changes = "the grid changes from 14×14 to 7×7 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")


def test_figures() -> None:
    photos = [np.random.default_rng(n).random((60, 60, 3)) for n in range(4)]
    figures = vitrail.look(explainer(), photos)
    assert {each.name for each in figures.figures} >= {"attention_distance", "alignment", "occlusion", "patch_pca"}
    distances = figures["attention_distance"].arrays["distances"]
    assert distances.shape == (5, 4)
    assert np.nanmax(distances[0]) < np.nanmin(distances[1])  # windows are near, keys of the whole image far
