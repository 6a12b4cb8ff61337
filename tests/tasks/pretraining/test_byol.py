"""BYOL: its loss, its projectors, its schedule and views, and the weights of its teacher."""

from math import cos, pi
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before lightly
from support.toy_task import RECIPE, make_backbone, make_data

from vitrail import create
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.schedule import Clock, Schedule
from vitrail.recipes.task_settings import ByolSettings
from vitrail.tasks import find_task
from vitrail.tasks.pretraining.byol import Byol, compare_with_targets
from vitrail.tasks.pretraining.parts.projection_heads import make_regression_projector
from vitrail.tasks.task import parse_task_settings
from vitrail.train.fit import fit

SMALL: dict[str, Any] = {"projector_width": 16, "projection_width": 8}


def test_loss_is_that_of_the_paper_and_of_lightly() -> None:
    random = torch.Generator().manual_seed(0)
    first, second, target_1, target_2 = torch.randn(4, 6, 8, generator=random)
    loss, cosine = compare_with_targets([first, second], [target_1, target_2])
    units = [F.normalize(each, dim=-1) for each in (first, second, target_1, target_2)]
    distances = (units[0] - units[3]).square().sum(-1) + (units[1] - units[2]).square().sum(-1)
    assert float(loss) == pytest.approx(float(distances.mean()), abs=1e-6)
    assert float(loss) == pytest.approx(4 - 4 * float(cosine), abs=1e-6)
    negative = pytest.importorskip("lightly.loss").NegativeCosineSimilarity()
    mean = (negative(first, target_2) + negative(second, target_1)) / 2
    assert float(loss) == pytest.approx(4 + 4 * float(mean), abs=1e-6)


@pytest.mark.parametrize(("width", "count"), [(384, 2_633_728), (768, 4_206_592), (2048, 9_449_472), (256, 2_109_440)])
def test_projector_and_predictor_have_the_parameters_of_the_authors(width: int, count: int) -> None:
    with torch.device("meta"):
        projector = make_regression_projector(width, 4096, 256)
    assert sum(each.numel() for each in projector.parameters()) == count
    assert (projector[1].momentum, projector[1].eps) == (0.1, 1e-5)


@pytest.mark.parametrize("step", [0, 500, 999])
def test_momentum_of_the_authors(step: int) -> None:
    found = parse_task_settings(find_task("byol"), open_recipe("byol")).teacher_momentum
    clock = Clock(step=step, steps=1000, steps_per_epoch=10)
    assert found.at(clock) == pytest.approx(1 - (1 - 0.996) * (1 + cos(pi * step / 1000)) / 2, abs=1e-9)


def test_views_have_the_constants_of_the_paper() -> None:
    views = Byol(make_backbone(), ByolSettings(**SMALL)).views
    assert views is not None
    first, second = views.values()
    for view, blur, solarize in ((first, 1.0, 0.0), (second, 0.1, 0.2)):
        augmentation: Any = view.augmentation
        assert (augmentation.area, augmentation.jitter_rate, augmentation.gray_rate) == ((0.08, 1.0), 0.8, 0.2)
        assert augmentation.jitter_strengths == (0.4, 0.4, 0.2, 0.1)
        assert (augmentation.blur_rate, augmentation.solarize_rate) == (blur, solarize)
        assert augmentation.solarize_threshold == 128


def test_teacher_starts_as_a_copy_and_follows_the_parameters_alone() -> None:
    """With momentum 0.75 and one step, it has moved a quarter of the way; its batch norms have their own averages."""
    torch.manual_seed(2)
    task: Any = Byol(make_backbone(), ByolSettings(**SMALL, teacher_momentum=Schedule(start=0.75)))
    before = {name: each.detach().clone() for name, each in task.teacher.named_parameters()}
    student = {name: each for name, each in task.named_parameters() if name.startswith(("backbone.", "projector."))}
    assert all(torch.equal(before[name], each) for name, each in student.items())
    fit(task, make_data(), RECIPE, steps=1, device="cpu")
    student = {name: each for name, each in task.named_parameters() if name.startswith(("backbone.", "projector."))}
    for name, mine in task.teacher.named_parameters():
        torch.testing.assert_close(mine, before[name].lerp(student[name], 0.25), atol=1e-6, rtol=0)
        assert not mine.requires_grad
    assert any(not torch.equal(before[name], each) for name, each in student.items())
    assert task.teacher["projector"][1].num_batches_tracked == 2  # one update per view
    assert task.result is task.backbone


def test_whitened_filters_are_those_of_the_teacher_too() -> None:
    recipe = open_recipe("byol-cpu").with_settings({"minutes": None, "batch": 24, "lr": 1e-9})
    task: Any = Byol(create("cct_cpu_32", classes=0), ByolSettings(**SMALL, view_size=8))
    before = task.backbone.patch_embed.layers[0].weight.clone()
    fit(task, make_data(), recipe, steps=1, device="cpu")
    weights: list[torch.Tensor] = [
        each.patch_embed.layers[0].weight for each in (task.backbone, task.teacher["backbone"])
    ]
    assert not torch.allclose(before, weights[0], atol=0.05)
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)
