"""Distillation by the one loop: who learns what, that it resumes, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_teacher import Convnet, teacher
from test_train_fit import EVERYTHING, PLAIN, StopAt, assert_same, data, pictures
from torch import Tensor, nn

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.train.distillation import add_distillation_to_plan, check_distill_token_fits_model
from vitrail.train.fit import fit
from vitrail.train.losses import DistillationLoss, classification_loss
from vitrail.train.plan import Plan
from vitrail.train.recipe import LoopSettings, Recipe
from vitrail.train.run_folder import RunFolder
from vitrail.train.teacher import Teacher
from vitrail.train.trainer import DivergedError

SEEN = Preprocessing(image_size=16, crop=1.0)


def student(**fields: Any) -> nn.Module:
    torch.manual_seed(1)
    given = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 4, **fields}
    return vitrail.create("deit_tiny_distilled_patch16_224", **given)


class Contrary(nn.Module):
    """Always says the class after the right one, which it reads off the colour."""

    means: Tensor

    def __init__(self) -> None:
        super().__init__()
        images, labels = pictures(400).images, pictures(400).labels
        means = torch.stack([torch.from_numpy(images[labels == each]).float().mean((0, 1, 2)) for each in range(4)])
        self.register_buffer("means", means / 127.5 - 1)

    def forward(self, images: Tensor) -> Tensor:
        return -10 * torch.cdist(images.mean((2, 3)), self.means).roll(1, 1)


def test_the_distillation_head_learns_the_teacher_and_the_class_head_the_labels() -> None:
    contrary = Teacher(model=Contrary(), preprocessing=SEEN, labels=pictures().classes)
    recipe = replace(PLAIN, loop=LoopSettings(epochs=30, batch=8))
    fitted = fit(student(), data(), recipe, teacher=contrary, device="cpu").model
    images = torch.from_numpy(pictures(24).images).permute(0, 3, 1, 2)[:, :, 2:18, 2:18].float() / 127.5 - 1
    by_label, by_teacher = fitted.heads(images)
    labels = torch.arange(24) % 4
    assert torch.equal(by_label.argmax(-1), labels)
    assert torch.equal(by_teacher.argmax(-1), (labels + 1) % 4)
    assert torch.equal(fitted(images), (by_label + by_teacher) / 2)


@pytest.mark.parametrize("distilled", [True, False])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_resuming_equals_never_stopping(kind: str, distilled: bool, tmp_path: Path) -> None:
    recipe = EVERYTHING.with_settings({"distill": kind, "save_every": 1})
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})

    def go(run: RunFolder, stop: int = 0) -> None:
        fields = {"distilled": distilled, "stochastic_depth": 0.2}
        fit(student(**fields), data(), recipe, teacher=teacher(), run=run, callback=StopAt(stop), device="cpu")

    go(whole)
    with pytest.raises(KeyboardInterrupt):
        go(cut, 5)
    go(cut)
    assert_same(whole, cut)
    assert "agreement" in whole.read_records()[0]


def test_the_teacher_computes_in_the_students_precision() -> None:
    kinds = list[torch.dtype]()
    net = Convnet()
    net.head.register_forward_hook(lambda _, __, out: kinds.append(out.dtype))
    fit(student(), data(), PLAIN.with_settings({"precision": "bfloat16"}), teacher=teacher(net), device="cpu", steps=2)
    assert kinds[1:] == [torch.bfloat16] * 2, "the first was to see whether it answers"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, inside its compiler
def test_a_compiled_teacher_and_student() -> None:
    plain = fit(student(), data(), PLAIN, teacher=teacher(), device="cpu", steps=3)
    compiled = fit(student(), data(), PLAIN.with_settings({"compile": True}), teacher=teacher(), device="cpu", steps=3)
    assert compiled.records[0]["loss"] == pytest.approx(plain.records[0]["loss"], abs=1e-4)


def test_what_a_recipe_says() -> None:
    def made(settings: dict[str, Any], **fields: Any) -> Any:
        recipe = Recipe().with_settings({"batch": 8, **settings})
        plan = Plan(model=student(**fields), data=data(), recipe=recipe, preprocessing=SEEN)
        return add_distillation_to_plan(plan, teacher())[0].objective

    assert made({"distill": "none"}) is classification_loss
    for kind, weight in (("hard", 0.5), ("soft", 0.1)):
        objective = made({"distill": kind})
        assert isinstance(objective, DistillationLoss)
        assert (objective.kind, objective.weight, objective.temperature, objective.uses_distillation_token) == (
            kind,
            weight,
            3.0,
            True,
        )
    objective = made({"distill": "soft", "teacher_weight": 0.0, "temperature": 1.5}, distilled=False)
    assert (objective.weight, objective.temperature, objective.uses_distillation_token) == (0.0, 1.5, False)


@pytest.mark.parametrize(
    ("settings", "said"),
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
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe().with_settings(settings)


def test_tokens_that_are_not_there() -> None:
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


def test_both_heads_at_another_resolution(tmp_path: Path) -> None:
    """Fine-tuning a distilled model at higher resolution keeps both heads."""
    first = fit(student(), data(), PLAIN, teacher=teacher(), device="cpu", steps=4).model
    vitrail.save(first, tmp_path / "student", labels=pictures().classes)
    larger = vitrail.load(tmp_path / "student", image_size=24)
    for name in ("head", "head_dist"):
        assert torch.equal(getattr(larger, name).weight, getattr(first, name).weight)
    assert torch.equal(larger.dist_token, first.dist_token)
    large = Preprocessing(image_size=24, crop=1.0)
    tuned = fit(larger, data(), PLAIN, teacher=teacher(), preprocessing=large, device="cpu", steps=2).model
    for name in ("head", "head_dist"):
        assert not torch.equal(getattr(tuned, name).weight, getattr(first, name).weight), "both go on learning"


class Sick(nn.Module):
    """Answers NaN from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(images), 4), float("nan") if self.calls > 2 else 0.0)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_teacher_that_falls_sick_ends_the_training(kind: str) -> None:
    sick = Teacher(model=Sick(), preprocessing=SEEN, labels=pictures().classes)
    with pytest.raises(DivergedError, match="the loss became nan at step 2"):
        fit(student(), data(), PLAIN.with_settings({"distill": kind}), teacher=sick, device="cpu")
