"""Recipes reach their documented accuracy on real images with public weights; takes minutes on two cores."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from vitrail.cli import build_app
from vitrail.train.run_folder import RunFolder

VIT = "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"


def train_and_read_accuracy(words: str, folder: Path) -> float:
    build_app()(["train", *shlex.split(words), "--out", str(folder)], exit_on_error=False, result_action="return_value")
    return RunFolder(folder).read_records()[-1]["val_top1"]


@pytest.mark.slow
def test_fashion_recipe_reaches_its_accuracy(tmp_path: Path) -> None:
    assert train_and_read_accuracy("--recipe fashion", tmp_path / "run") >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*preprocessing is not in the file")
@pytest.mark.parametrize("recipe", ["finetune", "linear-probe"])
def test_fine_tuning_recipes_reach_their_accuracy(recipe: str, shared: Callable[[str], Path], tmp_path: Path) -> None:
    words = f"--recipe {recipe} --data {shared('ants-bees')} --init {shared(VIT)}"
    assert train_and_read_accuracy(words, tmp_path / "run") >= 0.93


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*preprocessing is not in the file")
def test_fine_tuning_at_384_pixels_reaches_its_accuracy(shared: Callable[[str], Path], tmp_path: Path) -> None:
    words = f"--recipe linear-probe --data {shared('ants-bees')} --init {shared(VIT)} --image-size 384 --epochs 1"
    assert train_and_read_accuracy(words, tmp_path / "run") >= 0.93
