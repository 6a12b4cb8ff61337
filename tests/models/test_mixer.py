"""MLP-Mixer: outputs equal to timm and to the authors' code, which has another GELU; one image size."""

from collections.abc import Callable
from dataclasses import replace
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
from timm.models.mlp_mixer import MlpMixer

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.name_table import convert_to_our_tensors
from vitrail.models.mixer import PRESETS, SOURCES, Mixer, MixerConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = MixerConfig(image_size=32, patch_size=8, width=48, depth=3, mlp_width=96, classes=10)
PARAMETERS = {  # with and without the head
    "mixer_s32_224": (19_104_624, 18_591_624),
    "mixer_s16_224": (18_528_264, 18_015_264),
    "mixer_b32_224": (60_293_428, 59_524_428),
    "mixer_b16_224": (59_880_472, 59_111_472),
    "mixer_l32_224": (206_939_264, 205_914_264),
    "mixer_l16_224": (208_196_168, 207_171_168),
    "mixer_h14_224": (432_350_952, 431_069_952),
}


def make_timm_toy() -> Any:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_blocks": 3, "mlp_ratio": (0.5, 2.0)}
    return add_weight_noise(MlpMixer(**sizes, num_classes=10))


def load_into(config: MixerConfig, tensors: dict[str, torch.Tensor]) -> Mixer:
    ours = Mixer(config)
    ours.load_state_dict(tensors)
    return ours.eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_inference_from_shapes(name: str) -> None:
    with torch.device("meta"):
        headless = Mixer(replace(PRESETS[name], classes=0))
    assert (count_parameters(name), sum(each.numel() for each in headless.parameters())) == PARAMETERS[name]
    check_preset_is_inferred(name)


def test_output_and_gradients_equal_timm() -> None:
    theirs, images, labels = make_timm_toy(), torch.randn(4, 3, 32, 32), torch.arange(4)
    ours = load_into(TOY, theirs.state_dict())
    outputs = theirs(images), ours(images)
    assert outputs[0].std() > 0.01
    assert (outputs[1] - outputs[0]).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(images), theirs.forward_features(images))
    for logits in outputs:
        F.cross_entropy(logits, labels).backward()
    expected = {name: each.grad for name, each in theirs.named_parameters()}
    for name, each in ours.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def test_output_equals_the_authors_code_with_their_gelu(shared: Callable[[str], Path]) -> None:
    reference = read_reference(shared, "mixer")
    tensors, unknown = convert_to_our_tensors(reference.tensors, SOURCES[1].table)
    assert not unknown
    ours = load_into(replace(TOY, activation="gelu_tanh"), tensors)
    assert (ours(reference.images) - reference.logits).abs().max() <= 2e-5
    exact = load_into(TOY, tensors)
    assert (exact(reference.images) - reference.logits).abs().max() > 5e-5


def test_round_trip_of_timms_files(tmp_path: Path) -> None:
    theirs = make_timm_toy()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.model.config == TOY
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5


def test_round_trip_of_googles_files(tmp_path: Path) -> None:
    model = add_weight_noise(Mixer(replace(TOY, activation="gelu_tanh")))
    write(model, tmp_path / "Mixer-B_16.npz", "google")
    with np.load(tmp_path / "Mixer-B_16.npz") as arrays:
        assert arrays["stem/kernel"].shape == (8, 8, 3, 48)
        assert arrays["MixerBlock_2/token_mixing/Dense_1/kernel"].shape == (24, 16)
        assert arrays["MixerBlock_2/channel_mixing/Dense_0/kernel"].shape == (48, 96)
        assert {"pre_head_layer_norm/scale", "head/bias"} <= set(arrays.files)
    checkpoint = check_round_trip(tmp_path / "Mixer-B_16.npz", tmp_path / "back.npz", to="google")
    assert checkpoint.model.config == model.config
    assert_same_tensors(checkpoint.model.state_dict(), model.state_dict())
    with pytest.warns(UserWarning, match="timm cannot store activation='gelu_tanh', and its readers use 'gelu'"):
        write(model, tmp_path / "timm.safetensors", "timm")


def test_timm_opens_a_written_folder(tmp_path: Path) -> None:
    model = add_weight_noise(Mixer(replace(PRESETS["mixer_s32_224"], image_size=64, classes=5)))
    write(model, tmp_path / "folder", "timm", preprocessing=vitrail.Preprocessing(image_size=64))
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    with pytest.raises(CheckpointError, match="timm cannot open a folder of a custom mixer"):
        write(Mixer(TOY), tmp_path / "custom", "timm")


def test_another_image_size_is_an_error(tmp_path: Path) -> None:
    """Its weights are for one number of patches; with larger patches there are as many."""
    model = add_weight_noise(Mixer(TOY))
    with pytest.raises(ConfigError, match="image of 64×64 pixels; expected 32×32, which the model was built for"):
        model(torch.randn(1, 3, 64, 64))
    write(model, tmp_path / "mixer")
    with pytest.raises(CheckpointError, match=r"mlp_tokens.fc1.weight cannot be adapted to shape \(24, 64\)"):
        read(tmp_path / "mixer", image_size=64)
    assert read(tmp_path / "mixer", image_size=64, patch_size=16).model(torch.randn(1, 3, 64, 64)).shape == (1, 10)


def test_images_that_are_not_square_need_their_size(tmp_path: Path) -> None:
    model = add_weight_noise(Mixer(replace(TOY, image_size=(32, 64))))
    write(model, tmp_path / "wide.safetensors", "timm")
    assert read(tmp_path / "wide.safetensors", trained_size=(32, 64)).model.config == model.config
    write(Mixer(replace(TOY, image_size=(32, 40))), tmp_path / "odd.safetensors", "timm")
    with pytest.raises(CheckpointError, match="its positions are not those of a square; expected trained_size"):
        read(tmp_path / "odd.safetensors")
