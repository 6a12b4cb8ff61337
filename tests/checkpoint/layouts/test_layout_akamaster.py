"""akamaster's ResNets for CIFAR-10: a copy of its network, files in both directions, its published accuracy."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.layout_round_trip import assert_same_tensors, max_output_difference, write_checkpoint
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.cli import build_app

FILES = {"weights/resnet20-12fca82f.th": 0.9173, "weights/resnet56-4bfd9763.th": 0.9339}


class Block(nn.Module):
    """Copied from akamaster's resnet.py."""

    def __init__(self, before: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.changes, self.planes = before != planes, planes

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.changes:
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.planes // 4, self.planes // 4), "constant", 0)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class Published(nn.Module):
    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), *(Block(32, 32, 1) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64, 2), *(Block(64, 64, 1) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.avg_pool2d(x, x.size()[3]).flatten(1))


def make_published(classes: int = 10) -> Published:
    return randomize_batch_norms(add_weight_noise(Published(2, classes)))


def save_published(model: nn.Module, path: Path, *, without: str = "\0") -> None:
    tensors = {f"module.{name}": each for name, each in model.state_dict().items() if without not in name}
    torch.save({"state_dict": tensors, "best_prec1": 91.7}, path)


@pytest.mark.parametrize("without", ["\0", "num_batches_tracked"], ids=["new", "old"])
def test_round_trip_and_outputs(without: str, tmp_path: Path) -> None:
    theirs = make_published()
    save_published(theirs, tmp_path / "model.th", without=without)
    checkpoint = read(tmp_path / "model.th")
    assert (checkpoint.layout, checkpoint.description.family) == ("akamaster", "resnet")
    assert not checkpoint.report.warnings
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    write_checkpoint(checkpoint, tmp_path / "own", "vitrail")
    write_checkpoint(read(tmp_path / "own"), tmp_path / "back.th", "akamaster")
    assert_same_tensors(
        torch.load(tmp_path / "back.th", weights_only=True)["state_dict"],
        {f"module.{name}": each for name, each in theirs.state_dict().items()},
    )


def test_preprocessing_and_labels_of_the_layout(tmp_path: Path) -> None:
    save_published(make_published(), tmp_path / "model.th")
    description = vitrail.describe(tmp_path / "model.th")
    preprocessing = description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.image_size, preprocessing.crop, preprocessing.mean[0]) == ((32, 32), 1.0, 0.485)
    assert description.labels is not None
    assert description.labels[:3] == ("airplane", "automobile", "bird")
    save_published(make_published(classes=7), tmp_path / "seven.th")
    assert vitrail.describe(tmp_path / "seven.th").labels is None


def test_another_size_and_other_classes(tmp_path: Path) -> None:
    save_published(make_published(), tmp_path / "model.th")
    checkpoint = read(tmp_path / "model.th", image_size=48, classes=3)
    assert checkpoint.report.initialized == ("fc.weight", "fc.bias")
    assert checkpoint.description.labels is None
    assert checkpoint.description.preprocessing is not None
    assert checkpoint.description.preprocessing.image_size == (48, 48)
    assert not checkpoint.model(torch.randn(1, 3, 48, 48)).any()
    vitrail.save(vitrail.load(tmp_path / "model.th", classes=0), tmp_path / "features")
    assert vitrail.load(tmp_path / "features", classes=4).fc.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module.layer2.0.bn1.bias": None}, r"1 missing \(layer2\.0\.bn1\.bias\) of \d+ tensors"),
        ({"module.layer2.0.conv1.weight": torch.ones(2, 2)}, r"1 of another shape \(layer2\.0\.conv1\.weight\)"),
        ({"module.conv1.weight": torch.ones(16)}, r"conv1\.weight has shape \(16,\); expected 4 dimensions"),
        ({"module.conv1.weight": torch.ones(16, 3, 5, 5)}, r"expected a 7×7 kernel, or 3×3"),
        ({"module.linear.weight": torch.ones(10)}, r"fc\.weight has shape \(10,\); expected 2 dimensions"),
        ({"module.layer2.0.shortcut.0.weight": torch.ones(32, 16, 1, 1)}, r"1 tensors that are not part of a resnet"),
        ({"module.layer2.0.bn1.running_mean": None}, r"missing \(layer2\.0\.bn1\.running_mean"),
        (
            {"module.bn1.weight": torch.ones(16, dtype=torch.int64)},
            r"bn1\.weight has dtype int64; expected one of float32, float16, bfloat16, float64",
        ),
    ],
)
def test_wrong_tensors_are_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {f"module.{name}": each for name, each in make_published().state_dict().items()}
    tensors = {name: each for name, each in {**tensors, **change}.items() if each is not None}
    torch.save({"state_dict": tensors}, tmp_path / "bad.th")
    with pytest.raises(CheckpointError, match=message) as error:
        read(tmp_path / "bad.th")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": 7}, "classes is 7, which akamaster cannot represent; expected 10"),
        ({"shortcut": "projection"}, "shortcut is 'projection', which akamaster cannot represent"),
        ({"stages": (1, 1)}, "number of stages is 2, which akamaster cannot represent; expected 3"),
    ],
)
def test_unsupported_models_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(vitrail.create("resnet20_cifar", **fields), tmp_path / "model.th", "akamaster")
    with pytest.raises(CheckpointError, match="akamaster cannot represent a model of the family 'vit'"):
        write(vitrail.create("ViT-Ti/16", depth=1), tmp_path / "model.th", "akamaster")
    assert not (tmp_path / "model.th").exists()


def test_public_files_are_recognized(shared: Callable[[str], Path]) -> None:
    for file, depth in zip(FILES, (20, 56), strict=True):
        checkpoint = read(shared(file))
        assert checkpoint.layout == "akamaster"
        assert checkpoint.model.config == vitrail.create(f"resnet{depth}_cifar").config
        assert not checkpoint.report.warnings


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    def make(program: Path) -> Path:
        place = tmp_path_factory.getbasetemp() / "cifar10"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run([program, place], env={**os.environ, "PATH": path}, capture_output=True, check=False)
        if done.returncode:
            pytest.skip("needs CIFAR-10, which ../shared/data/get-cifar10 could not write")
        return place

    return make


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
def test_published_accuracy(
    file: str, shared: Callable[[str], Path], cifar10: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """91.73% and 93.39% of the 10,000 test images, as published."""
    weights, data = shared(file), cifar10(shared("get-cifar10"))
    words = ["eval", str(weights), "--data", str(data), "--batch", "250", "--json"]
    build_app()(words, exit_on_error=False, result_action="return_value")
    assert round(json.loads(capsys.readouterr().out)["top1"], 4) == FILES[file]
