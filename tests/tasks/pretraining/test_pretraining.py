"""What all tasks without labels share: evaluation with unreadable or missing images, and settings that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.pretraining_cases import CASES
from support.toy_task import RECIPE

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.datasets import open_data
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.parts.pretraining_figures import expand_to_rgb
from vitrail.tasks.task import Source

CPU = torch.device("cpu")
CLOCK = Clock(step=1, steps=2, steps_per_epoch=1)


def write_images(folder: Path, readable: int, unreadable: int = 0) -> None:
    """Random images of one color per folder; the unreadable ones are in between."""
    random = np.random.default_rng(len(str(folder.name)))
    folder.mkdir(parents=True)
    for number in range(readable):
        Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    for number in range(unreadable):
        (folder / f"{number}-broken.png").write_bytes(b"")


def set_up(folder: Path, name: str = "mae") -> tuple[Any, Source]:
    task: Any = CASES[name].make()
    source = open_image_source(task, open_data(folder, val_share=0.0, need_classes=False), RECIPE, need_classes=False)
    task.setup(source, RECIPE)
    return task, source


def evaluate(folder: Path, name: str = "mae") -> dict[str, float]:
    task, source = set_up(folder, name)
    return task.evaluate(source, CLOCK, batch=3, device=CPU).metrics


def test_unreadable_images_are_left_out_of_features_and_labels(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 4)):
        for label in ("a", "bb"):
            write_images(tmp_path / "clean" / part / label, count)
            write_images(tmp_path / "broken" / part / label, count, unreadable=2)
    expected = evaluate(tmp_path / "clean")
    found = evaluate(tmp_path / "broken")
    for name in ("spread", "effective_rank", "knn"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6), name
    task, source = set_up(tmp_path / "broken")
    assert 0 < task.load_figure_images(source, CPU).size < 8


@pytest.mark.parametrize("name", ["mae", "simclr", "dino"])
def test_validation_images_that_cannot_be_read_are_an_error(name: str, tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "a", 4)
    write_images(tmp_path / "val" / "a", 0, unreadable=3)
    with pytest.raises(DataError, match=r"none of 3 validation images.*broken"):
        evaluate(tmp_path, name)
    task, source = set_up(tmp_path, name)
    assert "knn" not in task.evaluate(source, CLOCK, batch=3, device=CPU, limit=2).metrics


def test_data_without_a_validation_part_has_no_metrics_of_features(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "a", 4)
    task, source = set_up(tmp_path)
    assert task.evaluate(source, CLOCK, batch=3, device=CPU).metrics == {}
    assert task.load_figure_images(source, CPU).size == 4, "training images"


def test_progressive_resizing_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "a", 4)
    task, source = set_up(tmp_path)
    recipe = replace(RECIPE, loop=replace(RECIPE.loop, early_size=4))
    with pytest.raises(ConfigError, match="`early_size` is 4; expected 0") as caught:
        task.check(source, recipe, task.ranks)
    assert caught.value.fields == ("early_size",)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_images_of_any_number_of_channels_can_be_shown(channels: int) -> None:
    images = np.linspace(0, 1.5, 2 * 3 * 3 * channels).reshape(2, 3, 3, channels)
    assert expand_to_rgb(images).shape == (2, 3, 3, 3)
    np.testing.assert_allclose(expand_to_rgb(images)[..., 1], images.mean(-1).clip(0, 1))
