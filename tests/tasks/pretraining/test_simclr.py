"""SimCLR: its loss against lightly's, its projector, its views, and what it refuses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before lightly
from support.toy_task import RECIPE, make_backbone, make_data
from torch import nn

from vitrail import create
from vitrail.base.errors import ConfigError
from vitrail.distributed import Ranks
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.task_settings import SimClrSettings
from vitrail.tasks.pretraining.parts.projection_heads import make_contrastive_projector
from vitrail.tasks.pretraining.simclr import SimClr, contrast
from vitrail.train.fit import fit


def draw_projections(images: int) -> torch.Tensor:
    return torch.randn(2 * images, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_loss_is_that_of_lightly(temperature: float) -> None:
    loss = pytest.importorskip("lightly.loss").NTXentLoss(temperature)
    mine, its = (draw_projections(8).requires_grad_() for _ in range(2))
    found, _ = contrast(mine, temperature, Ranks())
    expected = loss(*its.chunk(2))
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    found.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, its.grad, atol=1e-6, rtol=0)


def test_metrics_of_equal_and_of_perfect_projections() -> None:
    loss, metrics = contrast(torch.ones(16, 4), 0.1, Ranks())
    assert float(loss) == pytest.approx(math.log(15), abs=1e-6)
    assert float(loss) == pytest.approx(2.70805, abs=1e-5)
    assert float(metrics["relative_loss"]) == pytest.approx(1, abs=1e-6)
    loss, metrics = contrast(torch.eye(8).repeat(2, 1), 0.1, Ranks())
    assert float(loss) == pytest.approx(math.log(1 + 14 * math.exp(-10)), abs=1e-6)
    assert float(metrics["positive_first"]) == 1


def test_projectors_of_versions_2_and_1() -> None:
    three, two = make_contrastive_projector(12, 12, 8, 3), make_contrastive_projector(12, 20, 8, 2)
    assert [type(each).__name__ for each in two] == ["Linear", "SyncBatchNorm1d", "ReLU", "Linear", "SyncBatchNorm1d"]
    assert sum(each.numel() for each in three.parameters()) == 2 * (12 * 12 + 2 * 12) + 12 * 8 + 8
    assert all(each.bias is None for each in three if isinstance(each, nn.Linear))
    assert three[1].bias is not None
    assert three[-1].bias is None


def test_views_have_the_constants_of_the_paper() -> None:
    task: Any = SimClr(make_backbone())
    (view,) = task.views.values()
    augmentation = view.augmentation
    assert view.count == 2
    assert (augmentation.area, augmentation.aspect, augmentation.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    assert (augmentation.jitter_rate, augmentation.jitter_strengths) == (0.8, (0.8, 0.8, 0.8, 0.2))
    assert (augmentation.gray_rate, augmentation.blur_rate, augmentation.solarize_rate) == (0.2, 0.5, 0)
    assert (augmentation.blur_sigma, augmentation.blur_kernel) == ((0.1, 2.0), 0.1)
    task = SimClr(make_backbone(), SimClrSettings(jitter=0.5, blur=0))
    assert task.views["views"].augmentation.jitter_strengths == (0.4, 0.4, 0.4, 0.1)


@pytest.mark.parametrize(
    ("settings", "fields", "loop", "numbers"),
    [
        ({}, {}, {"batch": 1}, ("`batch` is 1", "2 or more")),
        ({}, {}, {"whiten": True}, ("`whiten` is true", "cct_cpu_32")),
        ({"view_size": 4}, {}, {}, ("`view_size` is 4", "8×8", "dynamic=true")),
        ({"view_size": 6}, {"dynamic": True}, {}, ("`view_size` is 6", "multiple of 4")),
        ({"jitter": 3}, {}, {}, ("`jitter` is 3", "0.6", "2.5 or less")),
        ({"view_size": 12}, {"dynamic": True}, {}, ("12×12", "10×10")),
    ],
)
def test_what_cannot_be_trained_is_refused(
    settings: dict[str, Any], fields: dict[str, Any], loop: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    recipe = replace(RECIPE, loop=replace(RECIPE.loop, **loop))
    with pytest.raises(ConfigError) as caught:
        fit(SimClr(make_backbone(**fields), SimClrSettings(**settings)), make_data(), recipe, device="cpu")
    assert all(number in str(caught.value) for number in numbers)
    assert "\n" not in str(caught.value)


def test_recipe_whitens_the_filters_and_takes_smaller_views() -> None:
    """One step of the CPU recipe at the size of a toy."""
    recipe = open_recipe("simclr-cpu").with_settings({"minutes": None, "batch": 24})
    task = SimClr(create("cct_cpu_32", classes=0), SimClrSettings(view_size=8))
    before = task.backbone.patch_embed.layers[0].weight.clone()
    fit(task, make_data(), recipe, steps=1, device="cpu")
    assert not torch.allclose(before, task.backbone.patch_embed.layers[0].weight, atol=0.05)
