"""Public weights on real photos, compared with the predictions of a reference run with timm."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import vitrail
from vitrail.checkpoint import read

MODELS = {  # file, mean of a channel in its layout, accuracy on the 1,000 photos
    "vit_tiny_augreg": ("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", 0.5, 0.759),
    "deit_tiny": ("weights/deit_tiny_patch16_224.pth", 0.485, 0.705),
}


def compare_with_reference(key: str, shared: Callable[[str], Path], step: int) -> tuple[float, float, float, float]:
    """Accuracy, shares of photos with the same top-1 and top-5, and the largest difference of the top-1 probability."""
    weights, mean, _ = MODELS[key]
    folder = shared("imagenet-val-1000")
    with shared("imagenet-val-1000-reference.csv").open() as file:
        rows = list(csv.DictReader(file))[::step]
    checkpoint = read(shared(weights))
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert preprocessing.mean[0] == mean
    predictor = vitrail.Predictor(
        checkpoint.model, preprocessing=replace(preprocessing, crop=0.875)
    )  # 224 of the stored 256 pixels
    correct = same_top1 = same_top5 = 0
    difference = 0.0
    for row, prediction in zip(
        rows, predictor.predict_all((folder / row["file"] for row in rows), batch=50), strict=True
    ):
        indices, expected = (
            [each.index for each in prediction.top],
            [int(index) for index in row[f"{key}_top5"].split()],
        )
        correct += indices[0] == int(row["label"])
        same_top1 += indices[0] == expected[0]
        same_top5 += indices == expected
        difference = max(difference, abs(prediction.top[0].probability - float(row[f"{key}_p1"])))
    return correct / len(rows), same_top1 / len(rows), same_top5 / len(rows), difference


@pytest.mark.parametrize("key", MODELS)
def test_public_weights_give_the_reference_predictions(key: str, shared: Callable[[str], Path]) -> None:
    _, same_top1, same_top5, difference = compare_with_reference(key, shared, step=20)
    assert same_top1 == 1
    assert same_top5 == 1
    assert difference < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("key", MODELS)
def test_public_weights_give_the_reference_accuracy(key: str, shared: Callable[[str], Path]) -> None:
    accuracy, same_top1, same_top5, difference = compare_with_reference(key, shared, step=1)
    assert accuracy == MODELS[key][2]
    assert same_top1 >= 0.999
    assert same_top5 >= 0.999
    assert difference < 1e-3
