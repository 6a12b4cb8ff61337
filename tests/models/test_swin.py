"""Swin and Swin-V2: outputs equal to timm, torchvision and transformers; weights by name and back; windows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from support.family_checks import mark_most_slow
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from timm.models import save_for_hf
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor
from torchvision.models import swin_transformer as torchvision_swin
from transformers import SwinConfig as TransformersConfig
from transformers import SwinForImageClassification, Swinv2ForImageClassification
from transformers import Swinv2Config as TransformersV2Config

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.swin import PRESETS, Swin, SwinConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = SwinConfig(image_size=64, stages=(2, 2), widths=(16, 32), heads=(2, 4), windows=4, classes=5)
TIMM: dict[str, Any] = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}


def toy(version: int = 1, **fields: Any) -> Swin:
    return add_weight_noise(Swin(replace(TOY, version=version, **fields)))


def of_timm(version: int, **fields: Any) -> Any:
    kind: Any = SwinTransformer if version == 1 else SwinTransformerV2
    return add_weight_noise(kind(**{**TIMM, "num_classes": 5, **fields}))


def of_torchvision(version: int) -> Any:
    v2: dict[str, Any] = {
        "block": torchvision_swin.SwinTransformerBlockV2,
        "downsample_layer": torchvision_swin.PatchMergingV2,
    }
    sizes: tuple[Any, ...] = ([4, 4], 16, [2, 2], [2, 4], [4, 4])
    model: Any = torchvision_swin.SwinTransformer(*sizes, num_classes=5, **(v2 if version == 2 else {}))
    return add_weight_noise(model)


def of_transformers(version: int, **fields: Any) -> Any:
    sizes: dict[str, Any] = {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    sizes |= {"num_labels": 5, **fields}
    if version == 1:
        return add_weight_noise(SwinForImageClassification(TransformersConfig(**sizes)))
    return add_weight_noise(Swinv2ForImageClassification(TransformersV2Config(**sizes)))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 64)))


@pytest.mark.parametrize("name", mark_most_slow(PRESETS))
def test_presets_have_the_tensors_of_timm(name: str) -> None:
    with torch.device("meta"):
        ours: Any = vitrail.create(name)
        other: Any = timm.create_model(name, img_size=PRESETS[name].image_size, num_classes=1000)
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in other.parameters())
    strides = [(4, 4), (8, 8), (16, 16), (32, 32)]
    assert (
        [level.stride for level in ours.levels] == strides == [2 * (each["reduction"],) for each in other.feature_info]
    )
    assert [level.width for level in ours.levels] == [each["num_chs"] for each in other.feature_info]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("fields", [{}, {"img_size": (32, 64)}, {"img_size": 16}], ids=["square", "oblong", "small"])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(version: int, fields: dict[str, Any], tmp_path: Path) -> None:
    """In the last case the map is smaller than a window, which shrinks to it."""
    other = of_timm(version, **fields)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    size = fields.get("img_size", 64)
    ours = read(tmp_path / "weights.pth", trained_size=size, windows=(4, 4)).model
    x = images(*(size if isinstance(size, tuple) else (size, size)))
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    features = other.forward_features(x).flatten(1, 2)
    torch.testing.assert_close(ours.tokens(x), features, rtol=1e-5, atol=1e-5)
    for mine, its in zip(ours.feature_maps(x), other.forward_intermediates(x, intermediates_only=True), strict=True):
        assert (mine - its).abs().max() <= 1e-5


@pytest.mark.parametrize("version", [1, 2])
def test_gradients_equal_timm(version: int, tmp_path: Path) -> None:
    other = of_timm(version, drop_path_rate=0.0)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    ours, x = read(tmp_path / "weights.pth", windows=(4, 4), trained_size=64).model, images()
    for model in (other, ours):
        model.train()(x).square().sum().backward()
    with torch.no_grad():
        for model in (other, ours):
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
    write(ours, tmp_path / "gradients.pth", "timm")
    found = torch.load(tmp_path / "gradients.pth", weights_only=True)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_round_trip_of_timms_files(version: int, suffix: str, tmp_path: Path) -> None:
    size = 32 if version == 1 else 64  # without a stated size, one window of 4 or 8 tokens is assumed in the last stage
    other = of_timm(version, img_size=size)
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(other.state_dict(), path)
    checkpoint = check_round_trip(path, tmp_path / f"back{suffix}", to="timm", windows=(4, 4))
    assert checkpoint.model.config == replace(TOY, version=version, image_size=size)
    assert max_output_difference(checkpoint.model, other, (size, size)) <= 1e-5


def test_the_window_of_version_2_is_not_in_its_weights(tmp_path: Path) -> None:
    for version, assumed in ((1, set[str]()), (2, {"windows"})):
        torch.save(of_timm(version).state_dict(), tmp_path / "weights.pth")
        checkpoint = read(tmp_path / "weights.pth")
        assert checkpoint.report.assumed.keys() - {"preprocessing"} == assumed
        assert checkpoint.model.config.windows == ((4, 4) if version == 1 else (8, 8))


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_the_authors(version: int, tmp_path: Path) -> None:
    """Their downsampling ends a stage, and computed tensors are stored."""
    other = of_timm(version)
    tensors = {
        name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head"): tensor
        for name, tensor in other.state_dict().items()
    }
    tensors["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    tensors["layers.0.blocks.1.attn_mask"] = torch.zeros(16, 16, 16)
    torch.save({"model": tensors}, tmp_path / "swin.pth")
    checkpoint = read(tmp_path / "swin.pth", windows=(4, 4), trained_size=64)
    assert max_output_difference(checkpoint.model, other, (64, 64)) <= 1e-5


@pytest.mark.parametrize("version", [1, 2])
def test_folders_of_timm(version: int, tmp_path: Path) -> None:
    model = toy(version, trained_windows=(4, 2) if version == 2 else None)
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (64, 64)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    name = "swin_tiny_patch4_window7_224" if version == 1 else "swinv2_tiny_window8_256"
    other = add_weight_noise(timm.create_model(name, **TIMM))
    save_for_hf(other, str(tmp_path / "hub"), model_args=TIMM, safe_serialization=True)
    assert max_output_difference(read(tmp_path / "hub").model, other, (64, 64)) <= 1e-5


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [64, 72])
def test_torchvision(version: int, size: int, tmp_path: Path) -> None:
    """Maps of 18×18 and 9×9 tokens are padded to whole windows, and the merged map to an even size."""
    other = of_torchvision(version)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth", windows=(4, 4), trained_size=size)
    assert checkpoint.layout == "torchvision"
    assert max_output_difference(checkpoint.model, other, (size, size)) <= 1e-5
    write(checkpoint.model, tmp_path / "back.safetensors", "torchvision")
    back = load_file(tmp_path / "back.safetensors")
    for name, tensor in other.state_dict().items():
        if version == 2 and name.endswith("qkv.bias"):
            assert not back[name][tensor.shape[0] // 3 : 2 * tensor.shape[0] // 3].any()  # of k: it is never used
        else:
            torch.testing.assert_close(back[name], tensor, rtol=1e-6, atol=1e-6)
    again = of_torchvision(version)
    again.load_state_dict(back)
    assert max_output_difference(checkpoint.model, again.eval(), (size, size)) <= 1e-5


def test_timm_shifts_before_it_pads(tmp_path: Path) -> None:
    """The authors, torchvision and transformers pad first: other outputs at sizes without whole windows."""
    other = of_timm(1, img_size=72)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    ours = read(tmp_path / "weights.pth", trained_size=72).model
    assert 1e-4 < max_output_difference(ours, other, (72, 72)) < 0.1


def test_preprocessing_of_torchvision(tmp_path: Path) -> None:
    model = add_weight_noise(Swin(replace(PRESETS["swin_tiny_patch4_window7_224"], stages=(1, 1, 6, 1), classes=5)))
    write(model, tmp_path / "weights.pth", "torchvision")
    preprocessing = read(tmp_path / "weights.pth").description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.crop, preprocessing.interpolation) == (224 / 232, "bicubic")


@pytest.mark.parametrize("version", [1, 2])
def test_transformers(version: int, tmp_path: Path) -> None:
    other = of_transformers(version)
    other.save_pretrained(tmp_path / "theirs")
    checkpoint = read(tmp_path / "theirs")
    assert (checkpoint.layout, checkpoint.model.config) == ("hf", replace(TOY, version=version))

    def run(x: Tensor) -> Tensor:
        return other(x).logits

    assert max_output_difference(checkpoint.model, run, (64, 64)) <= 1e-5
    write(checkpoint.model, tmp_path / "back", "hf")
    assert_same_tensors(read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "back"))
    other = type(other).from_pretrained(tmp_path / "back").eval()
    assert max_output_difference(checkpoint.model, run, (64, 64)) <= 1e-5
    save_file(other.state_dict(), tmp_path / "memory.safetensors")  # with the names in memory
    in_memory = read(tmp_path / "memory.safetensors", windows=(4, 4), trained_size=64)
    assert max_output_difference(in_memory.model, run, (64, 64)) <= 1e-5


def test_weights_of_a_sibling_are_told_apart(tmp_path: Path) -> None:
    """Swin-V2 is never read as a Swin: the version is in the names."""
    torch.save(of_timm(2).state_dict(), tmp_path / "v2.pth")
    assert read(tmp_path / "v2.pth").model.config.version == 2
    torch.save(of_timm(1).state_dict(), tmp_path / "v1.pth")
    for version, other in ((1, 2), (2, 1)):
        with pytest.raises(CheckpointError, match=f"version is {version} in the checkpoint, not {other}; only these"):
            read(tmp_path / f"v{version}.pth", version=other)
        write(toy(version), tmp_path / f"hf{version}", "hf")
    cards = {version: tmp_path / f"hf{version}" / "config.json" for version in (1, 2)}
    texts = {version: card.read_text() for version, card in cards.items()}
    for version, kind, other in ((1, "swin", "swinv2"), (2, "swinv2", "swin")):
        cards[version].write_text(texts[3 - version])
        with pytest.raises(CheckpointError, match=f"has the tensors of a {kind}, but model_type '{other}' in its conf"):
            read(tmp_path / f"hf{version}")


def test_other_windows_and_sizes(tmp_path: Path) -> None:
    """A table for larger windows is resampled; version 2 computes its biases for any window."""
    write(toy(), tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=96, windows=6, classes=3)
    assert set(loaded.report.resized.values()) == {"timm positions, 7×7 to 11×11"}
    assert len(loaded.report.resized) == 4
    assert loaded.model(images(96, 96)).shape == (2, 3)
    same = read(tmp_path / "ours", image_size=96)
    assert not same.report.resized
    dynamic, x = toy(dynamic=True), images(96, 72)
    dynamic.load_state_dict(same.model.state_dict())
    torch.testing.assert_close(read(tmp_path / "ours", image_size=(96, 72)).model(x), dynamic(x))
    write(toy(2), tmp_path / "v2")
    loaded = read(tmp_path / "v2", image_size=96, windows=6, trained_windows=(4, 4))
    assert not loaded.report.resized
    assert loaded.model.config.windows == (6, 6)
    with pytest.raises(ConfigError, match=r"66×64 pixels; expected a multiple of 4×4"):
        dynamic(images(66, 64))


@pytest.mark.parametrize("version", [1, 2])
def test_initial_weights(version: int) -> None:
    torch.manual_seed(0)
    model: Any = Swin(replace(TOY, version=version, stochastic_depth=0.3))
    rates = [block.drop_path.rate for layer in model.layers for block in layer.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    block = model.layers[1].blocks[1]
    assert block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    if version == 2:
        assert block.attn.logit_scale.exp().unique().tolist() == [pytest.approx(10)]
        assert not block.norm2.weight.any()


def test_recomputed_activations_give_equal_gradients() -> None:
    model: Any = toy(2)
    x = images()
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for layer in model.layers:
        for block in layer.blocks:
            block.recompute = True
    model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_one_window_is_that_of_all_stages() -> None:
    assert SwinConfig(windows=7) == SwinConfig(windows=(7, 7, 7, 7)) == SwinConfig()


def test_what_other_libraries_cannot_represent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"widths is \(16, 48\), which timm cannot represent; expected each twice"
    ):
        write(toy(widths=(16, 48)), tmp_path / "folder", "timm")
    for layout, path in (("torchvision", "file.pth"), ("hf", "folder")):
        with pytest.raises(CheckpointError, match=r"windows is \(4, 2\) .* cannot represent; expected one window"):
            write(toy(windows=(4, 2)), tmp_path / path, layout)
    with pytest.raises(CheckpointError, match=r"trained_windows is \(2, 2\), which torchvision cannot represent"):
        write(toy(2, trained_windows=(2, 2)), tmp_path / "file.pth", "torchvision")
    assert not list(tmp_path.iterdir())


def test_layer_decay_levels() -> None:
    levels = {weight.name: weight.level for weight in list_weights(toy())}
    assert levels["patch_norm.weight"] == 0
    assert levels["layers.1.downsample.reduction.weight"] == levels["layers.1.blocks.0.norm1.weight"] == 3
    assert levels["norm.weight"] == 5
    undecayed = {weight.name for weight in list_weights(toy()) if not weight.decays}
    assert "layers.0.blocks.0.attn.position_bias.table" in undecayed


def explainer(version: int = 1, **fields: Any) -> vitrail.Explainer:
    return vitrail.Explainer(toy(version, **fields), preprocessing=vitrail.Preprocessing(image_size=64))


PHOTO = np.random.default_rng(0).random((70, 70, 3))


@pytest.mark.parametrize("version", [1, 2])
def test_maps_of_windows(version: int) -> None:
    """A patch attends within its window; of a mean over all patches, every patch has a share."""
    subject = explainer(version)
    assert subject.default_method == "attention"
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    assert [tuple(each.shape) for each in captured.maps] == [(16, 2, 16, 16)] * 2 + [(4, 4, 16, 16)] * 2
    for weights in captured.maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    found = subject.explain(PHOTO, "attention", layer=0, token="5,6").map
    inside = np.zeros((16, 16), bool)
    inside[4:8, 4:8] = True
    assert np.array_equal(found > 0, inside)
    expected = captured.maps[0].mean(1)[5, 6].reshape(4, 4)  # window (1, 1), place (1, 2)
    np.testing.assert_allclose(found[4:8, 4:8], expected, rtol=1e-4)
    shifted = subject.explain(PHOTO, "attention", layer=1, token="5,6").map
    inside = np.zeros((16, 16), bool)
    inside[2:6, 6:10] = True
    assert np.array_equal(shifted > 0, inside)
    assert subject.explain(PHOTO, layer=-1).maps.shape == (1, 1, 8, 8)
    assert (subject.explain(PHOTO, "attention", layer=1).map > 0).all()
    assert subject.explain(PHOTO, "heads", layer=0).maps.shape == (1, 2, 16, 16)
    assert subject.explain(PHOTO, "norms", layer=1).maps.shape == (1, 1, 16, 16)


def test_rollout_is_refused_with_the_reason() -> None:
    changes = "the grid changes from 16×16 to 8×8 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}; use 'attention'"):
        explainer().explain(PHOTO, "rollout")
    single = explainer(stages=(2,), widths=(16,), heads=(2,), windows=4)
    with pytest.raises(ConfigError, match="its tokens attend within windows or to fewer keys, so layers have no"):
        single.explain(PHOTO, "grad-rollout")


def test_figures() -> None:
    photos = [np.random.default_rng(n).random((70, 70, 3)) for n in range(4)]
    figures = vitrail.look(explainer(), photos)
    assert {each.name for each in figures.figures} == {
        *("filters", "attention_distance", "alignment", "occlusion", "patch_pca"),
    }
    distances = figures["attention_distance"].arrays["distances"]
    assert distances.shape == (4, 4)
    assert np.nanmax(distances[:2]) < 4 * 4 * 2**0.5 < np.nanmax(distances[2:]) * 2  # within windows of 4×4 patches
