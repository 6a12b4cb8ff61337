"""NesT: outputs equal to timm's with the constants of each; weights by name and back; blocks, inspection, errors."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise
from timm.models.nest import Nest
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.nest import PRESETS, NesT, NesTConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store|readers)")
TOY = NesTConfig(image_size=64, stages=(1, 2, 1), widths=(16, 32, 48), heads=(2, 4, 2), classes=5)
CONSTANTS: dict[str, dict[str, Any]] = {  # of timm, by ours
    "google": {"pad_type": "same", "act_layer": partial(nn.GELU, approximate="tanh")},
    "timm_jx": {"pad_type": "same"},
    "timm": {},
}
FIELDS: dict[str, dict[str, Any]] = {
    "google": {},
    "timm_jx": {"activation": "gelu"},
    "timm": {"activation": "gelu", "padding": "symmetric"},
}


def toy(**fields: Any) -> NesT:
    return add_weight_noise(NesT(replace(TOY, **fields)))


def of_timm(**fields: Any) -> Any:
    sizes: dict[str, Any] = {"img_size": 64, "embed_dims": (16, 32, 48), "num_heads": (2, 4, 2), "depths": (1, 2, 1)}
    sizes |= {"num_classes": 5, "drop_path_rate": 0.0, **fields}
    return add_weight_noise(Nest(**sizes))


def read_weights_of(other: nn.Module, folder: Path, **fields: Any) -> Any:
    torch.save(other.state_dict(), folder / "weights.pth")
    return read(folder / "weights.pth", heads=(2, 4, 2), **fields).model


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 64)))


@pytest.mark.parametrize("constants", CONSTANTS)
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(constants: str, tmp_path: Path) -> None:
    """The authors' code is timm's with the tanh approximation of GELU and the padding of TensorFlow."""
    other, x = of_timm(**CONSTANTS[constants]), images()
    ours = read_weights_of(other, tmp_path, **FIELDS[constants])
    assert ours.config == replace(TOY, **FIELDS[constants])
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(x), other.forward_features(x).flatten(2).mT, rtol=1e-4, atol=1e-5)
    for mine, its in zip(ours.feature_maps(x), other.forward_intermediates(x, intermediates_only=True), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    assert [level.stride[0] for level in ours.levels] == [each["reduction"] for each in other.feature_info]


@torch.no_grad()
def test_constants_change_the_output() -> None:
    """Another padding more than another GELU: symmetric pools move the map by half a token."""
    ours, x = toy(), images()
    outputs = dict[str, Tensor]()
    for constants, fields in FIELDS.items():
        other = toy(**fields)
        other.load_state_dict(ours.state_dict())
        outputs[constants] = other(x)
    gelu = (outputs["google"] - outputs["timm_jx"]).abs().max().item()
    padding = (outputs["timm_jx"] - outputs["timm"]).abs().max().item()
    assert 1e-6 < gelu < 1e-2
    assert padding > 10 * gelu


def test_gradients_equal_timm(tmp_path: Path) -> None:
    other, x = of_timm(**CONSTANTS["google"]), images()
    ours = read_weights_of(other, tmp_path)
    for model in (other, ours):
        model.train()(x).square().sum().backward()
    with torch.no_grad():
        for model in (other, ours):
            for parameter in model.parameters():
                assert parameter.grad.abs().sum() > 0
                parameter.copy_(parameter.grad)
    write(ours, tmp_path / "gradients.pth", "timm")
    found = torch.load(tmp_path / "gradients.pth", weights_only=True)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_round_trip_of_timms_files(tmp_path: Path) -> None:
    """A file does not specify the constants; its name does."""
    published: dict[str, Any] = {"embed_dims": (96, 192, 384), "num_heads": (3, 6, 12), "depths": (1, 1, 1)}
    other = of_timm(**published, pad_type="same")
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    assert read(tmp_path / "weights.safetensors").report.assumed.keys() == {"preprocessing", "activation", "padding"}
    for name in ("nest_tiny", "nest_tiny_jx"):
        save_file(other.state_dict(), tmp_path / f"{name}.safetensors")
        config = read(tmp_path / f"{name}.safetensors").model.config
        assert config == replace(PRESETS[name], stages=(1, 1, 1), classes=5, image_size=64)
    path = tmp_path / "weights.safetensors"
    checkpoint = check_round_trip(path, tmp_path / "back.safetensors", to="timm", activation="gelu", padding="same")
    assert max_output_difference(checkpoint.model, other, (64, 64)) <= 1e-5


@pytest.mark.parametrize("name", ["nest_tiny", "nest_tiny_jx"])
def test_folders_of_timm(name: str, tmp_path: Path) -> None:
    """timm's factories take no other sizes than their own, and no other GELU."""
    model = add_weight_noise(NesT(replace(PRESETS[name], image_size=64, classes=5, activation="gelu")))
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder", activation="gelu").model.config == model.config
    assert read(tmp_path / "folder").model.config.activation == PRESETS[name].activation


def test_what_timm_cannot_represent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"timm cannot open a folder of a custom nest; expected OUT.safetensors"):
        write(toy(), tmp_path / "custom", "timm")
    with pytest.raises(CheckpointError, match=r"a grid of 8×16 tokens, which timm cannot represent; expected a square"):
        write(toy(image_size=(32, 64)), tmp_path / "oblong.pth", "timm")


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model: Any = NesT(replace(TOY, stochastic_depth=0.3))
    rates = [block.drop_path.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert model.stages[0].pos_embed.std().item() == pytest.approx(0.02, rel=0.1)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"80×64 pixels; expected 64×64, which the model was built for"):
        toy()(images(80, 64))


@torch.no_grad()
def test_other_sizes(tmp_path: Path) -> None:
    """The number of blocks stays, their size changes; also of oblong images, which timm refuses."""
    write(toy(), tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(96, 64), classes=3)
    resized = ("16×16 to 24×16", "8×8 to 12×8", "4×4 to 6×4")
    assert [*loaded.report.resized.values()] == [f"timm positions, {each}" for each in resized]
    dynamic, x = toy(dynamic=True), images(96, 64)
    dynamic.load_state_dict(read(tmp_path / "ours").model.state_dict())
    torch.testing.assert_close(dynamic(x), read(tmp_path / "ours", image_size=(96, 64)).model(x))


def test_layer_decay_levels() -> None:
    weights = {weight.name: weight for weight in list_weights(toy())}
    assert weights["patch_embed.proj.weight"].level == 0
    assert weights["stages.1.pool.conv.weight"].level == weights["stages.1.blocks.0.norm1.weight"].level == 2
    assert weights["norm.weight"].level == 5
    assert not weights["stages.1.pos_embed"].decays


def test_maps_of_blocks() -> None:
    photo = np.random.default_rng(0).random((70, 70, 3))
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=64))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([photo]))
    shapes = [(16, 2, 16, 16), (4, 4, 16, 16), (4, 4, 16, 16), (1, 2, 16, 16)]
    assert [tuple(each.shape) for each in captured.maps] == shapes
    found = subject.explain(photo, "attention", layer=0, token="5,6").map
    assert np.array_equal(found > 0, np.pad(np.ones((4, 4), bool), ((4, 8), (4, 8))))
    np.testing.assert_allclose(found[4:8, 4:8], captured.maps[0].mean(1)[5, 6].reshape(4, 4), rtol=1e-4)
    changes = "the grid changes from 16×16 to 8×8 between layers 0 and 1"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(photo, "rollout")


@pytest.mark.slow
def test_figures() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=64))
    figures = vitrail.look(subject, [np.random.default_rng(n).random((70, 70, 3)) for n in range(4)])
    assert {each.name for each in figures.figures} >= {"filters", "attention_distance", "alignment", "patch_pca"}
