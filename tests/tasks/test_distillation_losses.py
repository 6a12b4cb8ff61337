"""Distillation losses, compared with hand calculations and other implementations, and their gradients."""

from math import log
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.recipes.recipe import DistillationSettings
from vitrail.tasks.classification import LossInputs, classification_loss
from vitrail.tasks.distillation import DistillationLoss, hard_distillation_loss, soft_distillation_loss


def logits(seed: int, batch: int = 5, classes: int = 7) -> Tensor:
    return 3 * torch.randn(batch, classes, generator=torch.Generator().manual_seed(seed))


def student(**fields: bool) -> nn.Module:
    torch.manual_seed(0)
    name = "deit_tiny_distilled_patch16_224"
    model = vitrail.create(name, image_size=16, patch_size=8, width=16, depth=2, heads=2, classes=7, **fields)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def inputs() -> LossInputs:
    torch.manual_seed(1)
    labels = torch.arange(5)
    return LossInputs(torch.randn(5, 3, 16, 16), F.one_hot(labels, 7).float(), labels, labels)


def test_soft_loss_matches_a_hand_calculation() -> None:
    """Teacher (1/4, 3/4), student (1/2, 1/2): KL = 1/4·log(1/2) + 3/4·log(3/2)."""
    teacher, student_logits = torch.tensor([[0.0, log(3)]]), torch.zeros(1, 2)
    by_hand = 0.25 * log(0.5) + 0.75 * log(1.5)
    assert soft_distillation_loss(student_logits, teacher, 1.0).item() == pytest.approx(by_hand, abs=1e-7)
    assert soft_distillation_loss(student_logits, 2 * teacher, 2.0).item() == pytest.approx(4 * by_hand, abs=1e-6), (
        "the factor is τ²"
    )
    other_way = 0.5 * log(2) + 0.5 * log(2 / 3)
    assert by_hand != pytest.approx(other_way, abs=1e-3), "swapped arguments would give another value"


def test_hard_loss_matches_a_hand_calculation() -> None:
    """The teacher predicts class 1, which has probability 3/4 for the student."""
    student_logits, teacher = torch.tensor([[0.0, log(3)]]), torch.tensor([[-1.0, 5.0]])
    assert hard_distillation_loss(student_logits, teacher).item() == pytest.approx(-log(0.75), abs=1e-7)


def test_the_teachers_top_class_can_be_smoothed() -> None:
    """1 − ε of the label and ε of all classes evenly; off by default, and an error for soft distillation."""
    student_logits, teacher = logits(1), logits(2)
    targets = 0.9 * F.one_hot(teacher.argmax(-1), 7) + 0.1 / 7
    expected = -(targets * student_logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(hard_distillation_loss(student_logits, teacher, 0.1), expected)
    assert DistillationSettings().teacher_smoothing == 0
    with pytest.raises(ConfigError, match=r"`teacher_smoothing` 0\.1 with `distill` soft; expected `distill` hard"):
        DistillationSettings(distill="soft", teacher_smoothing=0.1)


@given(st.integers(0, 99), st.integers(100, 199), st.floats(0.5, 20))
def test_soft_loss_matches_the_definition_and_facebooks_code(one: int, other: int, tau: float) -> None:
    student_logits, teacher = logits(one), logits(other)
    ours = soft_distillation_loss(student_logits, teacher, tau)
    p, q = (teacher.double() / tau).softmax(-1), (student_logits.double() / tau).softmax(-1)
    assert ours.item() == pytest.approx(tau**2 * (p * (p / q).log()).sum(-1).mean().item(), rel=1e-3, abs=1e-5)
    # facebook's code divides by batch × classes, so its loss is smaller by the number of classes
    theirs = F.kl_div(
        F.log_softmax(student_logits / tau, 1), F.log_softmax(teacher / tau, 1), reduction="sum", log_target=True
    ) * (tau * tau / student_logits.numel())
    assert ours.item() == pytest.approx(7 * theirs.item(), rel=1e-4, abs=1e-6)
    assert ours.item() >= -1e-6
    assert soft_distillation_loss(teacher, teacher, tau).item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("token", [True, False])
def test_distillation_loss_combines_labels_and_teacher(kind: Literal["soft", "hard"], token: bool) -> None:
    model: Any = student(distilled=token)
    batch, teacher = inputs(), logits(3)
    objective = DistillationLoss(
        teacher_logits=lambda _: teacher, kind=kind, weight=0.3, temperature=2.0, uses_distillation_token=token
    )
    loss, metrics = objective(model, batch)
    by_label, by_teacher = (
        model.head_logits(model.encode(batch.images, queries=2)) if token else 2 * [model(batch.images)]
    )
    teacher_loss = (
        soft_distillation_loss(by_teacher, teacher, 2.0)
        if kind == "soft"
        else hard_distillation_loss(by_teacher, teacher)
    )
    assert loss.item() == pytest.approx(
        0.7 * F.cross_entropy(by_label, batch.labels).item() + 0.3 * teacher_loss.item()
    )
    assert metrics["agreement"] == (by_teacher.argmax(-1) == teacher.argmax(-1)).float().mean()
    assert metrics["accuracy"] == (by_label.argmax(-1) == batch.labels).float().mean()


def test_each_head_gets_gradients_from_its_own_target() -> None:
    """With λ = 0 the distillation head gets no gradient, with λ = 1 the class head gets none."""
    for weight, idle, busy in ((0.0, "head_dist", "head"), (1.0, "head", "head_dist")):
        model = student()
        objective = DistillationLoss(
            teacher_logits=lambda _: logits(3),
            kind="hard",
            weight=weight,
            temperature=1.0,
            uses_distillation_token=True,
        )
        objective(model, inputs())[0].backward()
        gradients = {name: getattr(model, name).weight.grad.abs().max() for name in ("head", "head_dist")}
        assert gradients[idle] == 0 < gradients[busy]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_teacher_equal_to_the_labels_gives_the_classification_loss(weight: float) -> None:
    model, batch = student(distilled=False), inputs()
    plain, _ = classification_loss(model, batch)
    plain.backward()
    expected = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    teacher_logits = 9 * F.one_hot(batch.labels, 7).float()
    loss, _ = DistillationLoss(
        teacher_logits=lambda _: teacher_logits,
        kind="hard",
        weight=weight,
        temperature=3.0,
        uses_distillation_token=False,
    )(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for mine, its in zip([each.grad for each in model.parameters()], expected, strict=True):
        torch.testing.assert_close(mine, its)
