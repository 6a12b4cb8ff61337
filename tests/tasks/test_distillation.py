"""Distillation: which head learns what, resuming, and settings that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_teacher import Convnet, teacher
from test_train_fit import EVERYTHING, PLAIN, StopAt, assert_same, color_images, create_runs, data
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.tasks.classification import Classification, classification_loss
from vitrail.tasks.distillation import DistillationLoss, check_distill_token_fits_model, make_distillation
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.teacher import Teacher
from vitrail.train.fit import fit
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import DivergedError

SEEN = Preprocessing(image_size=16, crop=1.0)


def student(**fields: Any) -> nn.Module:
    torch.manual_seed(1)
    given = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 4, **fields}
    return vitrail.create("deit_tiny_distilled_patch16_224", **given)


class NextClassTeacher(nn.Module):
    """Always predicts the class after the correct one, which it finds by color."""

    means: Tensor

    def __init__(self) -> None:
        super().__init__()
        images, labels = color_images(400).images, color_images(400).labels
        means = torch.stack([torch.from_numpy(images[labels == each]).float().mean((0, 1, 2)) for each in range(4)])
        self.register_buffer("means", means / 127.5 - 1)

    def forward(self, images: Tensor) -> Tensor:
        return -10 * torch.cdist(images.mean((2, 3)), self.means).roll(1, 1)


def test_distillation_head_learns_from_the_teacher_and_class_head_from_the_labels() -> None:
    next_class_teacher = Teacher(model=NextClassTeacher(), preprocessing=SEEN, labels=color_images().classes)
    recipe = replace(PLAIN, loop=LoopSettings(epochs=30, batch=8))
    fitted = fit(student(), data(), recipe, teacher=next_class_teacher, device="cpu").model
    images = torch.from_numpy(color_images(24).images).permute(0, 3, 1, 2)[:, :, 2:18, 2:18].float() / 127.5 - 1
    by_label, by_teacher = fitted.head_logits(fitted.encode(images, queries=2))
    labels = torch.arange(24) % 4
    assert torch.equal(by_label.argmax(-1), labels)
    assert torch.equal(by_teacher.argmax(-1), (labels + 1) % 4)
    assert torch.equal(fitted(images), (by_label + by_teacher) / 2)


@pytest.mark.parametrize("distilled", [True, False])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_resume_is_bit_identical(kind: str, distilled: bool, tmp_path: Path) -> None:
    recipe = EVERYTHING.with_settings({"distill": kind, "save_every": 1})
    uninterrupted, stopped = create_runs(tmp_path)

    def train_until(run: RunFolder, stop: int = 0) -> None:
        fields = {"distilled": distilled, "stochastic_depth": 0.2}
        fit(student(**fields), data(), recipe, teacher=teacher(), run=run, callbacks=StopAt(stop), device="cpu")

    train_until(uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        train_until(stopped, 5)
    train_until(stopped)
    assert_same(uninterrupted, stopped)
    assert "agreement" in uninterrupted.read_records()[0]


def test_teacher_runs_in_the_precision_of_the_student() -> None:
    kinds = list[torch.dtype]()
    net = Convnet()
    net.head.register_forward_hook(lambda _, __, out: kinds.append(out.dtype))
    fit(student(), data(), PLAIN.with_settings({"precision": "bfloat16"}), teacher=teacher(net), device="cpu", steps=2)
    assert kinds[1:] == [torch.bfloat16] * 2, "the first call checks the output"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, inside its compiler
def test_compiled_teacher_and_student_have_the_same_loss() -> None:
    plain = fit(student(), data(), PLAIN, teacher=teacher(), device="cpu", steps=3)
    compiled = fit(student(), data(), PLAIN.with_settings({"compile": True}), teacher=teacher(), device="cpu", steps=3)
    assert compiled.records[0]["loss"] == pytest.approx(plain.records[0]["loss"], abs=1e-4)


def test_recipe_sets_kind_weight_and_temperature() -> None:
    def build_objective(settings: dict[str, Any], **fields: Any) -> Any:
        recipe = Recipe().with_settings({"batch": 8, **settings})
        given = student(**fields)
        return make_distillation(
            given, teacher(), open_image_source(Classification(given), data(), recipe, SEEN), recipe
        )[0].objective

    assert build_objective({"distill": "none"}) is classification_loss
    for kind, weight in (("hard", 0.5), ("soft", 0.1)):
        objective = build_objective({"distill": kind})
        assert isinstance(objective, DistillationLoss)
        assert (objective.kind, objective.weight, objective.temperature, objective.uses_distillation_token) == (
            kind,
            weight,
            3.0,
            True,
        )
    objective = build_objective({"distill": "soft", "teacher_weight": 0.0, "temperature": 1.5}, distilled=False)
    assert (objective.weight, objective.temperature, objective.uses_distillation_token) == (0.0, 1.5, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature is 0; expected more than 0"),
        ({"temperature": -1.5}, "temperature is -1.5; expected more than 0"),
        ({"temperature": float("nan")}, "temperature is nan; expected more than 0"),
        ({"teacher_weight": -0.1}, "teacher_weight is -0.1; expected at least 0 and at most 1"),
        ({"teacher_weight": 1.01}, "teacher_weight is 1.01; expected at least 0 and at most 1"),
        ({"distill": "warm"}, "distill 'warm'"),
        ({"distillation_tau": 3}, "did you mean 'temperature'"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe().with_settings(settings)


def test_settings_that_do_not_fit_the_student_are_refused() -> None:
    token, on_class = (
        Recipe().with_settings({"distill_token": "distill"}),
        Recipe().with_settings({"distill_token": "class"}),
    )
    with pytest.raises(ConfigError, match="has no distillation token; expected one that has, such as deit_tiny_dist"):
        check_distill_token_fits_model(token, student(distilled=False))
    with pytest.raises(ConfigError, match="which would learn nothing; expected a model without"):
        check_distill_token_fits_model(on_class, student())
    check_distill_token_fits_model(token, student())
    check_distill_token_fits_model(on_class, student(distilled=False))
    with pytest.raises(ConfigError, match="either objective or teacher, not both"):
        fit(student(), data(), PLAIN, teacher=teacher(), objective=classification_loss)
    module: Any = Convnet()
    itself = student()
    with pytest.raises(ConfigError, match="the teacher is the student itself"):
        fit(itself, data(), PLAIN, teacher=replace(teacher(), model=itself))
    with pytest.raises(ConfigError, match="a teacher and a transform, but no preprocessing"):
        fit(student(), data(), PLAIN, teacher=teacher(), transform=lambda image: image)
    with pytest.raises(ConfigError, match="answer is 'class'; expected 'both' in training"):
        fit(student(answer="class"), data(), PLAIN)
    with pytest.raises(ConfigError, match=r"the teacher is a Convnet; expected its name, or .*vitrail.Teacher\("):
        fit(student(), data(), PLAIN, teacher=module)


def test_fine_tuning_at_another_size_keeps_both_heads(tmp_path: Path) -> None:
    """Fine-tuning a distilled model at higher resolution keeps both heads."""
    first = fit(student(), data(), PLAIN, teacher=teacher(), device="cpu", steps=4).model
    vitrail.save(first, tmp_path / "student", labels=color_images().classes)
    larger = vitrail.load(tmp_path / "student", image_size=24)
    for name in ("head", "head_dist"):
        assert torch.equal(getattr(larger, name).weight, getattr(first, name).weight)
    assert torch.equal(larger.dist_token, first.dist_token)
    large = Preprocessing(image_size=24, crop=1.0)
    tuned = fit(larger, data(), PLAIN, teacher=teacher(), preprocessing=large, device="cpu", steps=2).model
    for name in ("head", "head_dist"):
        assert not torch.equal(getattr(tuned, name).weight, getattr(first, name).weight), "both heads are still trained"


class NanTeacher(nn.Module):
    """Returns NaN from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(images), 4), float("nan") if self.calls > 2 else 0.0)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_nan_from_the_teacher_stops_training(kind: str) -> None:
    nan_teacher = Teacher(model=NanTeacher(), preprocessing=SEEN, labels=color_images().classes)
    with pytest.raises(DivergedError, match="the loss became nan at step 2"):
        fit(student(), data(), PLAIN.with_settings({"distill": kind}), teacher=nan_teacher, device="cpu")
