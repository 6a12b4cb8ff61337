"""Hints and relations: their formulas, what they read of each family, and settings that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distillation import student
from test_teacher import Convnet, teacher
from test_train_fit import EVERYTHING, PLAIN, StopAt, assert_same, create_runs, data
from torch import nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.contract import ImageModel
from vitrail.recipes.recipe import DistillationSettings
from vitrail.tasks.feature_distillation import angle_loss, distance_loss, find_hints, hint_loss, record_outputs
from vitrail.tasks.teacher import Teacher
from vitrail.train.fit import fit

SEEN = Preprocessing(image_size=16, crop=1.0)
SMALL: dict[str, Any] = {"image_size": 16, "classes": 4}


def vit_teacher(**fields: Any) -> Teacher:
    torch.manual_seed(2)
    given = {**SMALL, "patch_size": 4, "width": 24, "depth": 3, "heads": 2, **fields}
    return Teacher(model=vitrail.create("ViT-Ti/16", **given), preprocessing=SEEN, labels=data().classes)


def convnet_teacher() -> Teacher:
    torch.manual_seed(2)
    model = vitrail.create("ResNet-20", image_size=16, classes=4)
    return Teacher(model=model, preprocessing=SEEN, labels=data().classes)


def test_relations_equal_the_authors_code() -> None:
    ours, theirs = (torch.from_numpy(np.random.RandomState(seed).randn(6, width)) for seed, width in ((1, 4), (2, 5)))
    assert distance_loss(ours, theirs).item() == pytest.approx(0.0810317, abs=1e-7)
    assert angle_loss(ours, theirs).item() == pytest.approx(0.0938136, abs=1e-7)
    ours.requires_grad_()
    (distance_loss(ours, theirs) + angle_loss(ours, theirs)).backward()
    assert ours.grad is not None
    assert ours.grad.isfinite().all()
    assert distance_loss(theirs, 3 * theirs).item() == pytest.approx(0, abs=1e-12)  # scale and shift do not count
    assert angle_loss(theirs, 3 * theirs + 1).item() == pytest.approx(0, abs=1e-12)


def test_hints_sum_channels_and_average_places() -> None:
    ours, theirs = torch.randn(2, 3, 3, 5), torch.randn(2, 3, 3, 5)
    assert hint_loss(ours, theirs) == pytest.approx(0.5 * ((theirs - ours) ** 2).sum() / (2 * 3 * 3))


@pytest.mark.parametrize("distilled", [True, False])
def test_every_loss_decreases(distilled: bool) -> None:
    settings = {
        "distill": "none",
        "hint_weight": 0.2,
        "hints": "1:2,last:last",
        "distance_weight": 5,
        "angle_weight": 5,
    }
    recipe = PLAIN.with_settings({**settings, "epochs": 12, "lr": 3e-3})
    result = fit(student(distilled=distilled), data(), recipe, teacher=vit_teacher(), device="cpu")
    first, *_, last = (each for each in result.records if "hint_loss" in each)
    for name in ("hint_loss", "distance_loss", "angle_loss"):
        assert last[name] < 0.9 * first[name], name


def test_a_convnet_and_a_module_of_ones_own_teach_relations() -> None:
    recipe = PLAIN.with_settings({"distance_weight": 1})
    for each in (convnet_teacher(), teacher(Convnet())):
        assert "distance_loss" in fit(student(), data(), recipe, teacher=each, device="cpu", steps=1).records[0]


@pytest.mark.parametrize("tokens", ["patches", "class"])
def test_resume_is_bit_identical_and_keeps_the_projectors(tokens: str, tmp_path: Path) -> None:
    settings = {"hint_weight": 1, "hint_tokens": tokens, "angle_weight": 1, "accumulate": 1, "save_every": 1}
    recipe = EVERYTHING.with_settings(settings)
    uninterrupted, stopped = create_runs(tmp_path)
    for run, stop in ((uninterrupted, 0), (stopped, 5), (stopped, 0)):
        try:
            fit(student(), data(), recipe, teacher=vit_teacher(), run=run, callbacks=StopAt(stop), device="cpu")
        except KeyboardInterrupt:
            assert stop
    assert_same(uninterrupted, stopped)


@pytest.mark.parametrize(
    "preset",
    ["swin_tiny_patch4_window7_224", "pvt_v2_b0", "cait_xxs24_224", "ResNet-20", "efficientnet_b0", "cct_cpu_32"],
)
def test_blocks_of_other_families_have_maps(preset: str) -> None:
    sized: Any = vitrail.create(preset, image_size=64, classes=4).eval()
    settings = DistillationSettings(hint_weight=1)
    [hint] = find_hints(sized, sized, "the teacher", settings)
    with record_outputs(sized, [hint.student.module]) as found, torch.no_grad():
        sized(torch.zeros(2, sized.config.channels, 64, 64))
    read = hint.student.read(found[hint.student.module], "patches")
    assert read.shape == (2, hint.student.level.width, *hint.student.level.grid)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hints": "4:8"}, "`hints` or `hint_tokens` without hints; expected `hint_weight` more than 0"),
        ({"hint_weight": -1}, "hint_weight is -1; expected at least 0"),
        ({"hint_weight": 1, "hints": "4-8"}, "`hints` has '4-8'; expected STUDENT:TEACHER"),
        ({"hint_weight": 1, "hints": "9:1"}, "names block '9' of the student; expected last, or a number from 1 to 2"),
        ({"hint_weight": 1, "hints": "1:x"}, "names block 'x' of the teacher; expected last, or a number from 1 to 3"),
        ({"hint_weight": 1, "compile": True}, "`compile` is true; expected false with hints"),
        ({"angle_weight": 1, "accumulate": 2}, "`accumulate` is 2; expected 1 for Distillation"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(student(), data(), PLAIN.with_settings(settings), teacher=vit_teacher(), device="cpu", steps=1)


def test_teachers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def train(taught: Teacher, **settings: Any) -> None:
        recipe = PLAIN.with_settings({"hint_weight": 1, **settings})
        fit(student(), data(), recipe, teacher=taught, device="cpu", steps=1)

    with pytest.raises(ConfigError, match="2×2 places of the student with 3×3 of the teacher; expected grids of which"):
        train(replace(vit_teacher(image_size=15, patch_size=5), preprocessing=replace(SEEN, image_size=15)))
    with pytest.raises(ConfigError, match="the teacher is a Convnet, which declares no blocks"):
        train(teacher(Convnet()))
    with pytest.raises(ConfigError, match="the teacher has no class token; expected `hint_tokens` patches"):
        train(convnet_teacher(), hint_tokens="class")
    assert isinstance(convnet_teacher().model, ImageModel)
    assert isinstance(teacher(Convnet()).model, nn.Module)
