"""MaxViT: outputs equal to timm's and torchvision's, with the constants of each; weights by name and back; windows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.family_checks import count_parameters
from support.layout_round_trip import check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from torch import Tensor
from torchvision.models.maxvit import MaxVit

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.maxvit import PRESETS, MaxViT, MaxViTConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = MaxViTConfig(image_size=64, stem_width=8, stages=(1, 2), widths=(32, 64), heads=(1, 2), classes=5)
TIMM: dict[str, Any] = {
    "img_size": 64,
    "stem_width": 8,
    "depths": (1, 2),
    "embed_dim": (32, 64),
    "head_hidden_size": 64,
    "transformer_partition_ratio": 8,
}


def toy(**fields: Any) -> MaxViT:
    return randomize_batch_norms(add_weight_noise(MaxViT(replace(TOY, **fields))))


def of_timm(**fields: Any) -> Any:
    arguments: dict[str, Any] = {**TIMM, "num_classes": 5, **fields}
    model = timm.create_model("maxvit_tiny_tf_224", **arguments)
    return randomize_batch_norms(add_weight_noise(model))


def of_torchvision() -> MaxVit:
    sizes: dict[str, Any] = {"block_channels": [32, 64], "block_layers": [1, 2], "stem_channels": 8}
    model = MaxVit((64, 64), partition_size=8, head_dim=32, stochastic_depth_prob=0.1, num_classes=5, **sizes)
    return randomize_batch_norms(add_weight_noise(model))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 64)))


@pytest.mark.parametrize("size", [(64, 64), (32, 64)])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(size: tuple[int, int], tmp_path: Path) -> None:
    """timm's first map is that of the stem."""
    other, x = of_timm(img_size=size), images(*size)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    ours = read(tmp_path / "weights.pth").model
    assert ours.config == replace(TOY, image_size=size)
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(x), other.forward_features(x).flatten(2).mT, rtol=1e-4, atol=1e-5)
    _, *expected = other.forward_intermediates(x, intermediates_only=True)
    for mine, its in zip(ours.feature_maps(x), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    assert [level.stride[0] for level in ours.levels] == [each["reduction"] for each in other.feature_info][1:]


def test_gradients_and_statistics_equal_timm(tmp_path: Path) -> None:
    other, x = of_timm(), images()
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    ours = read(tmp_path / "weights.pth").model
    for model in (other, ours):
        F.cross_entropy(model.train()(x), torch.arange(2)).backward()
    with torch.no_grad():
        for model in (other, ours):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
    write(ours, tmp_path / "gradients.pth", "timm")
    found = torch.load(tmp_path / "gradients.pth", weights_only=True)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=1e-5, msg=name)


def test_round_trip_of_timms_files(tmp_path: Path) -> None:
    save_file(of_timm().state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.report.assumed.keys() == {"preprocessing"}


@pytest.mark.parametrize("window", [None, 4])
def test_folders_of_timm(window: int | None, tmp_path: Path) -> None:
    model = toy(window=window)
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config


def test_torchvision(tmp_path: Path) -> None:
    """Its attention divides by the root of the width, which becomes part of the queries."""
    other = of_torchvision()
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth")
    assert (checkpoint.layout, checkpoint.model.config) == ("torchvision", replace(TOY, constants="torchvision"))
    assert max_output_difference(checkpoint.model, other, (64, 64)) <= 1e-5
    write(checkpoint.model, tmp_path / "back.safetensors", "torchvision")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == other.state_dict().keys()
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


@torch.no_grad()
def test_constants_of_torchvision_are_others() -> None:
    """The same weights, of which it does not have two biases, with the other padding, pool and GELU."""
    ours, other, x = toy(), toy(constants="torchvision"), images()
    missing = ours.state_dict().keys() - other.state_dict().keys()
    assert missing == {"stem.conv1.bias", "head.fc.bias"}
    for name in missing:
        ours.get_parameter(name).zero_()
    other.load_state_dict(ours.state_dict(), strict=False)
    assert (ours(x) - other(x)).abs().max() > 0.01


def test_what_libraries_cannot_represent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"constants is 'torchvision', which timm cannot represent"):
        write(toy(constants="torchvision"), tmp_path / "folder", "timm")
    with pytest.raises(CheckpointError, match=r"heads is \(1, 4\), which timm cannot represent; expected heads of one"):
        write(toy(heads=(1, 4)), tmp_path / "folder", "timm")
    with pytest.raises(CheckpointError, match=r"heads is \(2, 4\), which torchvision cannot .* heads of width 32"):
        write(toy(heads=(2, 4), constants="torchvision"), tmp_path / "file.pth", "torchvision")
    assert not list(tmp_path.iterdir())
    other: Any = timm.create_model("maxvit_tiny_rw_224", img_size=64, depths=(1, 1, 1, 1), embed_dim=(32,) * 4)
    torch.save(other.state_dict(), tmp_path / "rw.pth")
    with pytest.raises(CheckpointError, match=r"tensors that are not part of a maxvit .*without them it would be"):
        read(tmp_path / "rw.pth")


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model: Any = MaxViT(replace(TOY, stochastic_depth=0.2)).eval()
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert [block.attn_grid.drop_path.rate for block in blocks] == pytest.approx([0, 0.1, 0.2])
    assert blocks[2].attn_block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"96×64 pixels; expected 64×64, which the model was built for"):
        toy()(images(96, 64))
    with pytest.raises(ConfigError, match=r"96×64 pixels; expected a multiple of 64×64.* to 128×64"):
        toy(dynamic=True)(images(96, 64))


def test_other_sizes_on_load(tmp_path: Path) -> None:
    """By default the windows grow with the image, and the tables are resampled; or the windows stay as they are."""
    write(toy(), tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=96, classes=3)
    assert set(loaded.report.resized.values()) == {"timm positions, 15×15 to 23×23"}
    assert loaded.model(images(96, 96)).shape == (2, 3)
    same = read(tmp_path / "ours", image_size=128, window=8)
    assert not same.report.resized
    dynamic, x = toy(dynamic=True), images(128, 128)
    dynamic.load_state_dict(same.model.state_dict())
    torch.testing.assert_close(dynamic(x), same.model(x))


def test_layer_decay_levels() -> None:
    """The convolution of a block has the level of the attention that follows."""
    weights = {weight.name: weight for weight in list_weights(toy())}
    assert weights["stem.conv1.weight"].level == 0
    names = ("conv.conv1_1x1", "attn_block.norm1", "attn_grid.norm1")
    assert [weights[f"stages.1.blocks.0.{name}.weight"].level for name in names] == [3, 3, 4]
    assert weights["head.norm.weight"].level == 7
    assert not weights["stages.0.blocks.0.attn_grid.attn.position_bias.table"].decays


def test_maps_of_windows_and_of_the_grid() -> None:
    photo = np.random.default_rng(0).random((70, 70, 3))
    subject = vitrail.Explainer(toy(window=4), preprocessing=vitrail.Preprocessing(image_size=64))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([photo]))
    assert [tuple(each.shape) for each in captured.maps] == [(16, 1, 16, 16)] * 2 + [(4, 2, 16, 16)] * 4
    near = subject.explain(photo, "attention", layer=0, token="5,6").map > 0
    assert np.array_equal(near, np.pad(np.ones((4, 4), bool), ((4, 8), (4, 8))))
    far = subject.explain(photo, "attention", layer=1, token="5,6").map > 0
    expected = np.zeros((16, 16), bool)
    expected[1::4, 2::4] = True  # every fourth row and column
    assert np.array_equal(far, expected)
    changes = "the grid changes from 16×16 to 8×8 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(photo, "rollout")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_in_timm(name: str) -> None:
    if name != "maxvit_t":
        with torch.device("meta"):
            other: Any = timm.create_model(name, num_classes=1000)  # xlarge has 21,843
        assert count_parameters(name) == sum(each.numel() for each in other.parameters())
