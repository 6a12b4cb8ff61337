"""The real thing: public weights on real photos, and the classes that a reference run with timm gave each of them."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import vitrail
from vitrail.checkpoint import read

MODELS = {  # file, mean of a channel that its layout gives, accuracy on the 1,000 photos
    "vit_tiny_augreg": ("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", 0.5, 0.759),
    "deit_tiny": ("weights/deit_tiny_patch16_224.pth", 0.485, 0.705),
}


def compared(key: str, shared: Callable[[str], Path], step: int) -> tuple[float, float, float, float]:
    """Accuracy; shares of photos with the reference's top-1 and with its top-5; largest difference of the first."""
    weights, mean, _ = MODELS[key]
    folder = shared("imagenet-val-1000")
    with shared("imagenet-val-1000-reference.csv").open() as file:
        rows = list(csv.DictReader(file))[::step]
    found = read(shared(weights))
    how = found.description.preprocessing
    assert how is not None
    assert how.mean[0] == mean
    predictor = vitrail.Predictor(found.model, preprocessing=replace(how, crop=0.875))  # 224 of the stored 256 pixels
    right = first = five = 0
    apart = 0.0
    for row, answer in zip(rows, predictor.predict_all((folder / row["file"] for row in rows), batch=50), strict=True):
        indices, expected = [each.index for each in answer.top], [int(index) for index in row[f"{key}_top5"].split()]
        right += indices[0] == int(row["label"])
        first += indices[0] == expected[0]
        five += indices == expected
        apart = max(apart, abs(answer.top[0].probability - float(row[f"{key}_p1"])))
    return right / len(rows), first / len(rows), five / len(rows), apart


@pytest.mark.parametrize("key", MODELS)
def test_public_weights_give_the_reference_answers(key: str, shared: Callable[[str], Path]) -> None:
    _, first, five, apart = compared(key, shared, step=20)
    assert first == 1
    assert five == 1
    assert apart < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("key", MODELS)
def test_public_weights_give_the_reference_accuracy(key: str, shared: Callable[[str], Path]) -> None:
    accuracy, first, five, apart = compared(key, shared, step=1)
    assert accuracy == MODELS[key][2]
    assert first >= 0.999
    assert five >= 0.999
    assert apart < 1e-3
