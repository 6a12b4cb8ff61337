"""DINO: its loss, center, head and schedules against the authors' formulas and lightly, and its momentum teacher."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before lightly
from support.pretraining_cases import CASES, CROPS, SMALL_HEAD
from support.toy_task import RECIPE, make_backbone, make_data

# isort: split
from lightly.loss import DINOLoss
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.distributed import Ranks
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import DinoSettings
from vitrail.tasks.pretraining.dino import Dino
from vitrail.tasks.pretraining.parts.projection_heads import PrototypeHead
from vitrail.tasks.pretraining.parts.self_distillation import Center, MomentumTeacher, cross_entropy_between_crops
from vitrail.train.fit import fit

START = Clock(step=0, steps=9, steps_per_epoch=3)

pytestmark = pytest.mark.filterwarnings("ignore::vitrail.tasks.metric.CollapseWarning")  # toy runs have no warm-up


def make_dino(fields: Mapping[str, Any] | None = None, **settings: Any) -> Dino:
    given = DinoSettings(**{**SMALL_HEAD, **CROPS, **settings})
    return Dino(make_backbone(**{"dynamic": True, **(fields or {})}), given)


@pytest.fixture
def outputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 4, 7), torch.randn(2, 4, 7)  # of the student for V crops, of the teacher for 2


def test_loss_and_center_are_those_of_lightly_and_of_a_loop_over_pairs(outputs: tuple[Tensor, Tensor]) -> None:
    student, teacher = outputs
    theirs, center = DINOLoss(7, warmup_teacher_temp_epochs=0), Center(7, 0.9)
    for _ in range(3):  # the center of one step is used in the next
        expected = theirs(list(teacher), list(student), teacher_temp=0.04)
        targets = ((teacher - center.value) / 0.04).softmax(-1)
        loss = cross_entropy_between_crops(student, targets, 0.1)
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
        pairs = [
            -(targets[q] * (student[v] / 0.1).log_softmax(-1)).sum(-1).mean()
            for q in (0, 1)
            for v in range(5)
            if v != q
        ]
        assert len(pairs) == 8
        torch.testing.assert_close(loss, torch.stack(pairs).mean(), atol=1e-6, rtol=1e-6)
        for micro_batch in teacher.split(2, dim=1):
            center.observe(micro_batch)
        center.average(Ranks())
        center.update()
        torch.testing.assert_close(center.value, theirs.center.flatten(), atol=1e-7, rtol=1e-6)
        teacher = teacher + 1


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_head_has_the_authors_parameters_and_formula() -> None:
    for width, count in ((192, 21_958_912), (384, 22_352_128), (768, 23_138_560)):
        with torch.device("meta"):
            head = PrototypeHead(width, 2048, 256, 65536)
        assert sum(each.numel() for each in head.parameters()) == count
        assert sum(each.numel() for each in head.parameters() if each.requires_grad) == count - 65536
    head, x = PrototypeHead(12, 10, 6, 16), torch.randn(3, 12)
    nn.init.uniform_(head.last_layer.weight_g)
    last = nn.utils.weight_norm(nn.Linear(6, 16, bias=False))  # raises an error if copied
    last.load_state_dict(head.last_layer.state_dict())
    torch.testing.assert_close(head(x), last(F.normalize(head.mlp(x), dim=-1)))
    torch.testing.assert_close(deepcopy(head)(x), head(x))
    assert [name for name, _ in head.named_parameters()] == [
        *(f"mlp.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")),
        "last_layer.weight_g",
        "last_layer.weight_v",
    ]


def test_schedules_are_those_of_the_authors() -> None:
    epochs, per_epoch = 100, 7
    steps, recipe = epochs * per_epoch, vitrail.open_recipe("dino")
    settings = vitrail.tasks.task.parse_task_settings(vitrail.tasks.find_task("dino"), recipe)
    weight_decay = vitrail.recipes.schedule.parse_schedule(recipe.schedules["weight_decay"], "weight_decay")
    temperatures = np.concatenate([np.linspace(0.04, 0.07, 30), np.full(epochs - 30, 0.07)])

    def cosine(start: float, end: float) -> Any:  # cosine_scheduler of their utils.py
        return end + 0.5 * (start - end) * (1 + np.cos(np.pi * np.arange(steps) / steps))

    for step in (0, 1, per_epoch, 29 * per_epoch - 1, 29 * per_epoch, 30 * per_epoch, steps - 1):
        clock = Clock(step=step, steps=steps, steps_per_epoch=per_epoch)
        assert settings.teacher_temperature.at(clock) == pytest.approx(temperatures[step // per_epoch], abs=1e-12)
        assert settings.teacher_momentum.at(clock) == pytest.approx(cosine(0.996, 1.0)[step], abs=1e-12)
        assert weight_decay.at(clock) == pytest.approx(cosine(0.04, 0.4)[step], abs=1e-12)
    assert recipe.optimization.final_lr * recipe.optimization.lr * recipe.loop.batch / 256 == pytest.approx(1e-6)


def test_teacher_has_no_gradients_and_no_stochastic_depth() -> None:
    task = make_dino({"stochastic_depth": 0.9})
    x = torch.randn(4, 3, 8, 8)
    task.train()
    assert torch.equal(task.teacher["backbone"](x), task.teacher["backbone"](x))
    assert not torch.equal(task.backbone(x), task.backbone(x))
    batch = next(iter(open_source(task).load_batches(range(1), accumulate=1, workers=0, ranks=Ranks(), pin=False)))
    loss, _ = task(batch, START)
    loss.backward()
    assert all(weight.grad is None for weight in task.teacher.parameters())
    unused = [name for name, weight in task.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not unused


def open_source(task: Dino) -> Any:
    source = vitrail.tasks.image_task.open_image_source(task, make_data(), RECIPE)
    task.setup(source, RECIPE)
    return source


def test_gradients_are_clipped_per_tensor_and_the_last_layer_is_frozen_at_first() -> None:
    task = make_dino(frozen_epochs=1, clip_each=3.0)
    for weight in task.parameters():
        weight.grad = torch.full_like(weight, 5.0) if weight.requires_grad else None
    task.centres["head"].observe(torch.ones(1, 16))
    task.before_step(START)
    assert task.heads["head"].last_layer.weight_v.grad is None
    norms = [weight.grad.norm().item() for weight in task.parameters() if weight.grad is not None]
    assert norms == pytest.approx([3.0] * len(norms), rel=1e-5)
    task.heads["head"].last_layer.weight_v.grad = torch.ones(16, 6)
    task.centres["head"].observe(torch.ones(1, 16))
    task.before_step(replace(START, step=3))
    assert task.heads["head"].last_layer.weight_v.grad is not None


def test_teacher_follows_the_parameters_and_its_batch_norms_use_the_batch() -> None:
    student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    teacher = MomentumTeacher({"body": student})
    start = deepcopy(student)
    with torch.no_grad():
        for weight in student.parameters():
            weight += 1
    teacher.train()
    x = torch.randn(8, 4)
    expected = F.batch_norm(start[0](x), None, None, training=True)
    torch.testing.assert_close(teacher["body"](x), expected)
    teacher.follow({"body": student}, 0.9)
    for mine, old in zip(teacher.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(mine, old + 0.1)
    teacher.eval()
    assert not any(module.training for module in teacher.modules())


def test_prototypes_in_use_are_counted_over_all_validation_images() -> None:
    task = make_dino()
    result = fit(task, make_data(), RECIPE, device="cpu")
    assert task.usage.sum() == 2 * 24  # two global crops of each image
    assert result.evaluation.metrics["prototypes"] == (task.usage > 0).sum() > 1
    assert result.model is task.teacher["backbone"]


@pytest.mark.parametrize(
    ("fields", "settings", "words"),
    [
        ({"dynamic": False}, {}, ("`local_size` is 4", "8×8", "dynamic=true")),
        ({}, {"local_size": 6}, ("`local_size` is 6", "multiple of 4")),
        ({}, {"global_size": 12}, ("global_1", "12×12", "10×10")),
    ],
)
def test_crops_that_do_not_fit_are_refused(fields: dict[str, Any], settings: dict[str, Any], words: Any) -> None:
    with pytest.raises(ConfigError) as error:
        fit(make_dino(fields, **settings), make_data(), RECIPE, device="cpu")
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_models_without_a_class_token_use_their_pooled_output() -> None:
    assert "dino" in CASES
    small = {"width": 12, "heads": 2, "depth": 1, "stem": (4, 4), "classes": 0, "image_size": 8}
    task = Dino(vitrail.create("cct_cpu_32", **small), DinoSettings(**SMALL_HEAD, **CROPS))
    assert fit(task, make_data(), RECIPE, device="cpu").evaluation.metrics["loss"] > 0
