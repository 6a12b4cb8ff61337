"""A CaiT learns from a teacher, and teaches; what was interrupted goes on to the bit, its dropouts too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from test_train_fit import EVERYTHING, PLAIN, StopAt, assert_same, data, pictures

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.train.fit import fit
from vitrail.train.recipe import LoopSettings
from vitrail.train.run_folder import RunFolder
from vitrail.train.teacher import Teacher

SEEN = Preprocessing(image_size=16, crop=1.0)


def cait(**fields: Any) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 4}
    return vitrail.create("cait_xxs24_224", **(sizes | fields))


def test_it_teaches_and_learns() -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=30, batch=8))
    taught = fit(cait(layer_scale=1.0), data(), recipe, device="cpu").model
    images = torch.from_numpy(pictures(24).images).permute(0, 3, 1, 2)[:, :, 2:18, 2:18].float() / 127.5 - 1
    labels = torch.arange(24) % 4
    assert (taught(images).argmax(-1) == labels).float().mean() >= 0.9
    teacher = Teacher(model=taught, preprocessing=SEEN, labels=pictures().classes)
    lessons = recipe.with_settings({"distill": "hard", "teacher_weight": 1.0})
    student = fit(cait(layer_scale=1.0, depth=1), data(), lessons, teacher=teacher, device="cpu").model
    assert (student(images).argmax(-1) == labels).float().mean() >= 0.9


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_equals_never_stopping(optimizer: str, tmp_path: Path) -> None:
    recipe = EVERYTHING.with_settings({"distill": "soft", "save_every": 1, "optimizer": optimizer, "layer_decay": 0.8})
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    teacher = Teacher(model=add_weight_noise(cait()), preprocessing=SEEN, labels=pictures().classes)

    def go(run: RunFolder, stop: int = 0) -> None:
        fields = {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.2}
        fit(cait(**fields), data(), recipe, teacher=teacher, run=run, callback=StopAt(stop), device="cpu")

    go(whole)
    with pytest.raises(KeyboardInterrupt):
        go(cut, 5)
    go(cut)
    assert_same(whole, cut)
