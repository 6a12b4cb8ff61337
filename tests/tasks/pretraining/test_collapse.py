"""A forced collapse is reported within three log windows after the warm-up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.pretraining_cases import CROPS, SMALL_HEAD
from support.toy_task import RECIPE, make_backbone, make_data

from vitrail.recipes.pretraining_settings import DinoSettings, EsvitSettings
from vitrail.recipes.recipe import OptimizationSettings
from vitrail.recipes.schedule import Schedule
from vitrail.tasks.collapse import CollapsedError
from vitrail.tasks.pretraining.dino import Dino
from vitrail.tasks.pretraining.esvit import Esvit
from vitrail.tasks.task import Task
from vitrail.train.fit import fit

WARMUP = 6  # steps, each of which is a log window; enough for the collapse to happen
NO_CENTRING: dict[str, Any] = {**SMALL_HEAD, **CROPS, "centre_momentum": 1.0, "teacher_momentum": Schedule(start=0.5)}
TASKS: dict[str, Callable[[Any], Task]] = {
    "dino": lambda backbone: Dino(backbone, DinoSettings(**NO_CENTRING)),
    "esvit": lambda backbone: Esvit(backbone, EsvitSettings(**NO_CENTRING)),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_forced_collapse_is_reported(name: str) -> None:
    torch.manual_seed(0)
    recipe = replace(
        RECIPE,
        optimization=OptimizationSettings(lr=10, warmup=WARMUP / 3),
        loop=replace(RECIPE.loop, epochs=4, stop_on_collapse=True),
        schedules={},
    )
    with pytest.raises(CollapsedError) as error:
        fit(TASKS[name](make_backbone(dynamic=True)), make_data(), recipe, device="cpu")
    assert f"collapsed at step {WARMUP + 3}:" in str(error.value)
    assert "`lr`" in str(error.value)
