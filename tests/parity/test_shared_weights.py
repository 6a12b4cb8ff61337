"""The real thing: public weights on real photos, and the classes that a reference run with timm gave each of them."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import vitrail

MODELS = {
    "vit_tiny_augreg": (
        "vit_tiny_patch16_224",
        "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
        0.759,
    ),
    "deit_tiny": (
        "deit_tiny_patch16_224",
        "weights/deit_tiny_patch16_224.pth",
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
        0.705,
    ),
}


def load(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)["model"]


def read(path: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """The photos are 256 pixels at their short side; the models saw the 224 in the middle."""
    photo = Image.open(path).convert("RGB")
    left, top = round((photo.width - 224) / 2), round((photo.height - 224) / 2)
    pixels = torch.from_numpy(np.array(photo.crop((left, top, left + 224, top + 224)))).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def batches(rows: list[dict[str, str]], size: int = 50) -> Iterator[list[dict[str, str]]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def agreement(model: nn.Module, folder: Path, rows: list[dict[str, str]], key: str) -> tuple[float, float, float]:
    """Top-1 accuracy; share of photos whose top-1 is the reference's; largest difference of its probability."""
    _, _, mean, std, _ = MODELS[key]
    right = same = 0
    apart = 0.0
    for part in batches(rows):
        images = torch.stack([read(folder / row["file"], mean, std) for row in part])
        with torch.inference_mode():
            probabilities = model(images).softmax(-1)
        for row, each in zip(part, probabilities, strict=True):
            answer = int(row[f"{key}_top5"].split()[0])
            right += int(each.argmax()) == int(row["label"])
            same += int(each.argmax()) == answer
            apart = max(apart, abs(each[answer].item() - float(row[f"{key}_p1"])))
    return right / len(rows), same / len(rows), apart


def prepare(shared: Callable[[str], Path], key: str) -> tuple[nn.Module, Path, list[dict[str, str]]]:
    name, weights, *_ = MODELS[key]
    model = vitrail.create(name)
    model.load_state_dict(load(shared(weights)))
    with shared("imagenet-val-1000-reference.csv").open() as file:
        return model.eval(), shared("imagenet-val-1000"), list(csv.DictReader(file))


@pytest.mark.parametrize("key", MODELS)
def test_public_weights_give_the_reference_answers(key: str, shared: Callable[[str], Path]) -> None:
    model, folder, rows = prepare(shared, key)
    _, same, apart = agreement(model, folder, rows[::25], key)
    assert same == 1
    assert apart < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("key", MODELS)
def test_public_weights_give_the_reference_accuracy(key: str, shared: Callable[[str], Path]) -> None:
    model, folder, rows = prepare(shared, key)
    accuracy, same, apart = agreement(model, folder, rows, key)
    assert accuracy == MODELS[key][4]
    assert same == 1
    assert apart < 1e-3
