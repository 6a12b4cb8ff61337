"""A forced collapse of tasks without labels is reported within three log windows after the warm-up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.pretraining_cases import CROPS, SMALL_HEAD, STABLE_VIEWS
from support.toy_task import RECIPE, make_backbone, make_data

from vitrail.recipes.recipe import OptimizationSettings
from vitrail.recipes.schedule import Schedule
from vitrail.recipes.task_settings import ByolSettings, DinoSettings, EsvitSettings, SimClrSettings
from vitrail.tasks.metric import CollapsedError
from vitrail.tasks.pretraining.byol import Byol
from vitrail.tasks.pretraining.dino import Dino
from vitrail.tasks.pretraining.esvit import Esvit
from vitrail.tasks.pretraining.simclr import SimClr
from vitrail.tasks.task import Task
from vitrail.train.fit import fit

NO_CENTRING: dict[str, Any] = {**SMALL_HEAD, **CROPS, "center_momentum": 1.0, "teacher_momentum": Schedule(start=0.5)}
TASKS: dict[str, Callable[[Any], Task]] = {
    "byol": lambda model: Byol(model, ByolSettings(**STABLE_VIEWS, projector_width=16, projection_width=8)),
    "simclr": lambda model: SimClr(model, SimClrSettings(**STABLE_VIEWS, loss_temperature=0.1)),
    "dino": lambda model: Dino(model, DinoSettings(**NO_CENTRING)),
    "esvit": lambda model: Esvit(model, EsvitSettings(**NO_CENTRING)),
}


def train(name: str, *, blind: bool = False) -> None:
    """Twelve steps, each a log window; the first six are the warm-up. A blind model sees no pixels."""
    backbone = make_backbone(dynamic=True)
    if blind:
        for weights in backbone.patch_embed.parameters():
            weights.requires_grad_(False).zero_()
    torch.manual_seed(2)
    optimization = OptimizationSettings(lr=3e-3, warmup=2, schedule="constant")
    loop = replace(RECIPE.loop, epochs=4, stop_on_collapse=True)
    recipe = replace(RECIPE, optimization=optimization, loop=loop, schedules={})
    fit(TASKS[name](backbone), replace(make_data(), val=None), recipe, device="cpu")


@pytest.mark.parametrize("name", TASKS)
def test_collapse_is_reported(name: str) -> None:
    """Forced by a blind model: whether a learning rate of 10 is enough depends on the CPU."""
    with pytest.raises(CollapsedError, match=r"collapsed at step 9: .*`lr`"):
        train(name, blind=True)


@pytest.mark.parametrize("name", ["byol", "simclr"])
def test_healthy_run_is_not_reported(name: str) -> None:
    train(name)


def test_loss_of_equal_projections_is_a_sign() -> None:
    shown = [sign.metric for sign in SimClr.collapse_signs if sign.is_shown_by({"relative_loss": 1.0, "spread": 0.3})]
    assert shown == ["relative_loss"]
