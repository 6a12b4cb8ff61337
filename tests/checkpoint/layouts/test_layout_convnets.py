"""Convnets of timm and torchvision at toy size, in both directions: files, folders, and unsupported variants."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision.models as peers
from safetensors.torch import save_file
from support.layout_round_trip import check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from timm.data.config import resolve_model_data_config
from torch import nn
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock, Bottleneck

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "basic": ("resnet18", {"layers": (1, 2, 1, 1), "num_classes": 5}),
    "bottleneck": ("resnet50", {"layers": (1, 1, 2, 1), "num_classes": 5}),
    "regnety": ("regnety_040", {"depth": 6, "w0": 16, "wa": 16.0, "wm": 2.0, "group_size": 8, "num_classes": 5}),
    "no head, four channels": ("resnet18", {"layers": (1, 1, 1, 1), "num_classes": 0, "in_chans": 4}),
}


def randomize(model: Any) -> Any:
    return randomize_batch_norms(add_weight_noise(model))


def toy(kind: str) -> Any:
    name, fields = KINDS[kind]
    return randomize(timm.create_model(name, **fields))


def save_weights(model: nn.Module, path: Path) -> Path:
    save_file(model.state_dict(), path) if path.suffix == ".safetensors" else torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_of_timms_files(kind: str, suffix: str, tmp_path: Path) -> None:
    theirs = toy(kind)
    path = save_weights(theirs, tmp_path / f"weights{suffix}")
    checkpoint = check_round_trip(path, tmp_path / f"back{suffix}", to="timm")
    channels = KINDS[kind][1].get("in_chans", 3)
    assert len(checkpoint.report.matched) == len(theirs.state_dict())
    assert checkpoint.model.config.channels == channels
    images = torch.randn(2, channels, 64, 48)
    with torch.no_grad():
        assert (checkpoint.model(images) - theirs(images)).abs().max() <= 1e-5


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_round_trip_of_torchvision_resnets(block: Any, tmp_path: Path) -> None:
    theirs = randomize(peers.ResNet(block, [1, 1, 2, 1], num_classes=5))
    path = save_weights(theirs, tmp_path / "weights.pth")
    checkpoint = check_round_trip(path, tmp_path / "back.pth", to="torchvision", source="torchvision")
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    theirs.load_state_dict(read_tensors(tmp_path / "back.pth"))
    assert max_output_difference(vitrail.load(path), theirs) <= 1e-5  # read as timm's, which is the same


def test_round_trip_of_torchvision_regnets(tmp_path: Path) -> None:
    size = BlockParams.from_init_params(depth=6, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25)
    theirs = randomize(peers.RegNet(size, num_classes=5))
    path = save_weights(theirs, tmp_path / "weights.pth")
    checkpoint = check_round_trip(path, tmp_path / "back.pth", to="torchvision")
    assert checkpoint.description.family == "regnety"
    assert max_output_difference(checkpoint.model, theirs, (64, 64)) <= 1e-5
    theirs.load_state_dict(read_tensors(tmp_path / "back.pth"))
    write(checkpoint.model, tmp_path / "timm.safetensors", "timm")
    assert max_output_difference(read(tmp_path / "timm.safetensors").model, theirs, (64, 64)) <= 1e-5


@pytest.mark.parametrize("to", ["timm", "torchvision"])
def test_preprocessing_of_the_layout(to: str, tmp_path: Path) -> None:
    path = save_weights(toy("basic"), tmp_path / "weights.pth")
    checkpoint = read(path, source=to)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.crop, preprocessing.interpolation, preprocessing.image_size, preprocessing.mean[0]) == (
        0.875,
        "bilinear",
        (224, 224),
        0.485,
    )
    assert bool(checkpoint.report.assumed) == (to == "timm")  # tags of timm differ
    write(checkpoint.model, tmp_path / "back.safetensors", to)
    assert read(tmp_path / "back.safetensors").layout == to


def test_training_checkpoints_without_counters_are_read(tmp_path: Path) -> None:
    theirs = toy("basic")
    tensors = {f"module.{n}": t for n, t in theirs.state_dict().items() if not n.endswith("num_batches_tracked")}
    torch.save({"epoch": 3, "arch": "resnet18", "state_dict": tensors}, tmp_path / "last.pth.tar")
    checkpoint = read(tmp_path / "last.pth.tar")
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    assert checkpoint.model.bn1.num_batches_tracked.dtype == torch.int64


def test_timm_opens_a_written_folder(tmp_path: Path) -> None:
    model = randomize(vitrail.create("resnet18", classes=5, image_size=64))
    preprocessing = vitrail.Preprocessing(image_size=64, crop=0.75, mean=(0.1, 0.2, 0.3))
    write(model, tmp_path / "folder", "timm", preprocessing=preprocessing, labels=list("abcde"))
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened) <= 1e-5
    assert resolve_model_data_config(opened)["crop_pct"] == 0.75
    again = read(tmp_path / "folder")
    assert again.model.config == model.config
    assert (again.description.preprocessing, again.description.labels) == (preprocessing, tuple("abcde"))
    assert not again.report.warnings
    card = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps({**card, "model_args": {"act_layer": "silu"}}))
    with pytest.raises(CheckpointError, match="act_layer is 'silu', which is not supported; expected a plain resnet"):
        read(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text(json.dumps({**card, "global_pool": "catavgmax"}))
    with pytest.raises(CheckpointError, match="global_pool is 'catavgmax'"):
        read(tmp_path / "folder")


def test_custom_shapes_and_cifar_stems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"timm cannot open a folder of a custom resnet; expected OUT\.safetensors"
    ):
        write(vitrail.create("resnet18", stages=(1, 1, 1, 1)), tmp_path / "folder", "timm")
    for to in ("timm", "torchvision"):
        with pytest.raises(CheckpointError, match=f"stem is 'cifar', which {to} cannot represent; expected 'imagenet'"):
            write(vitrail.create("resnet20_cifar"), tmp_path / "file.pth", to)
    with pytest.raises(CheckpointError, match="google cannot represent a model of the family 'resnet'"):
        write(vitrail.create("resnet20_cifar"), tmp_path / "file.npz", "google")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wide_resnet50_2", r"does not fit its config: \d+ of another shape \(layer1\.0\.conv1\.weight"),
        ("resnext50_32x4d", r"does not fit its config: \d+ of another shape"),
        ("seresnet50", r"has \d+ tensors that are not part of a resnet .*\(layer1\.0\.se"),
        ("resnet50_gn", r"does not fit its config: \d+ missing"),
        ("resnetaa50", r"architecture is 'resnetaa50', which is not supported"),
        ("resnet50d", r"33 tensors that are not part of a resnet .*\(conv1\.0\.weight"),
    ],
)
def test_resnet_variants_are_refused(name: str, message: str, tmp_path: Path) -> None:
    relative = timm.create_model(name, layers=(1, 1, 1, 1), num_classes=2)
    path = save_weights(relative, tmp_path / f"{name}.tag.pth")
    with pytest.raises(CheckpointError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("regnetx_040", r"does not fit its config: \d+ missing \(s1\.b1\.se\.fc1"),
        ("regnetz_040", r"does not fit its config: .* of another shape"),
        ("regnety_040_sgn", r"does not fit its config: \d+ missing"),
    ],
)
def test_regnet_variants_are_refused(name: str, message: str, tmp_path: Path) -> None:
    relative = timm.create_model(name, depth=6, w0=16, wa=16.0, wm=2.0, group_size=8, num_classes=2)
    with pytest.raises(CheckpointError, match=message):
        read(save_weights(relative, tmp_path / f"{name}.tag.pth"))


def test_facebooks_regnety_teacher_is_read(tmp_path: Path) -> None:
    theirs = toy("regnety")
    torch.save({"model": theirs.state_dict()}, tmp_path / "regnety_160-a5fe301d.pth")
    checkpoint = read(tmp_path / "regnety_160-a5fe301d.pth")
    assert checkpoint.description.family == "regnety"
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.crop, preprocessing.interpolation, preprocessing.mean[0]) == (0.95, "bicubic", 0.485)
