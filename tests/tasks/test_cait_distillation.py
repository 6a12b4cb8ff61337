"""CaiT as student and as teacher; a resumed distillation is bit-identical, with dropout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from test_train_fit import EVERYTHING, PLAIN, StopAt, assert_same, color_images, create_runs, data

import vitrail
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.recipes.recipe import LoopSettings
from vitrail.tasks.teacher import Teacher
from vitrail.train.fit import fit
from vitrail.train.run_folder import RunFolder

SEEN = Preprocessing(image_size=16, crop=1.0)


def cait(**fields: Any) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 4}
    return vitrail.create("cait_xxs24_224", **(sizes | fields))


def test_cait_learns_from_a_cait_teacher() -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=30, batch=8))
    teacher_model = fit(cait(layer_scale=1.0), data(), recipe, device="cpu").model
    images = torch.from_numpy(color_images(24).images).permute(0, 3, 1, 2)[:, :, 2:18, 2:18].float() / 127.5 - 1
    labels = torch.arange(24) % 4
    assert (teacher_model(images).argmax(-1) == labels).float().mean() >= 0.9
    teacher = Teacher(model=teacher_model, preprocessing=SEEN, labels=color_images().classes)
    distillation_recipe = recipe.with_settings({"distill": "hard", "teacher_weight": 1.0})
    student = fit(cait(layer_scale=1.0, depth=1), data(), distillation_recipe, teacher=teacher, device="cpu").model
    assert (student(images).argmax(-1) == labels).float().mean() >= 0.9


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_bit_identical(optimizer: str, tmp_path: Path) -> None:
    recipe = EVERYTHING.with_settings({"distill": "soft", "save_every": 1, "optimizer": optimizer, "layer_decay": 0.8})
    uninterrupted, stopped = create_runs(tmp_path)
    teacher = Teacher(model=add_weight_noise(cait()), preprocessing=SEEN, labels=color_images().classes)

    def train_until(run: RunFolder, stop: int = 0) -> None:
        fields = {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.2}
        fit(cait(**fields), data(), recipe, teacher=teacher, run=run, callbacks=StopAt(stop), device="cpu")

    train_until(uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        train_until(stopped, 5)
    train_until(stopped)
    assert_same(uninterrupted, stopped)
