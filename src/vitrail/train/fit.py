"""`fit`, the one loop: a model, data and a recipe put together and trained."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from vitrail.data.datasets import Data, open_data
from vitrail.data.foreign import Dataset
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.train.distill import distilling
from vitrail.train.distributed import Team, device_of
from vitrail.train.evaluate import plain_preprocessing
from vitrail.train.losses import Objective, classify
from vitrail.train.recipe import Recipe, open_recipe
from vitrail.train.run import Run
from vitrail.train.setup import Setup
from vitrail.train.sitting import Sitting, interrupts
from vitrail.train.speed import measure
from vitrail.train.state import State, read_state
from vitrail.train.tally import Evaluation
from vitrail.train.teacher import Teacher
from vitrail.train.watch import Several, Watch


@dataclass(frozen=True)
class Fitted:
    """What came out: the trained model is in eval mode, and the one given, or the average of its weights."""

    model: Any
    steps: int
    evaluation: Evaluation | None
    records: list[dict[str, float]]
    skipped: tuple[str, ...]  # why pictures could not be read


def fit(
    model: nn.Module,
    data: Data | Dataset | str | Path,
    recipe: Recipe | str | None = None,
    *,
    objective: Objective | None = None,
    teacher: Teacher | str | Path | None = None,
    teacher_cache: Path | None = None,
    preprocessing: Preprocessing | None = None,
    transform: Callable[[Any], Any] | None = None,
    run: Run | None = None,
    steps: int | None = None,
    device: str = "auto",
    workers: int = 0,
    strict: bool = False,
    team: Team | None = None,
    watch: Watch | None = None,
) -> Fitted:
    """Trains the model on the data by the recipe; goes on from the run's last checkpoint if it has one.

    `data` is what `open_data` takes, `transform` a function from a Pillow image to the model's input (torchvision's
    are such), used in training in place of the recipe's augmentation. With a `teacher` (its name as `vitrail distill`
    takes it, or a vitrail.Teacher) the loss is the recipe's distillation; `teacher_cache` is a folder that keeps its
    answers. With `strict` an unreadable picture is an error.
    """
    start, team = monotonic(), team or Team()
    recipe = open_recipe(recipe) if isinstance(recipe, str) else recipe or Recipe()
    if not isinstance(recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"recipe is a {type(recipe).__name__}; expected a name, or vitrail.open_recipe(…).changed(…)")
    if teacher is not None and transform is not None and preprocessing is None:
        raise ConfigError(
            "a teacher beside a transform, and no preprocessing; expected the mean and std that the transform ends "
            "with, as vitrail.Preprocessing(…), so that the teacher's own can take their place"
        )
    preprocessing, place = preprocessing or plain_preprocessing(model), device_of(device, team)
    opened = open_data(data, seed=recipe.loop.seed)
    if teacher is not None:
        if objective is not None:
            raise ConfigError("an objective beside a teacher; expected one of them: the teacher's loss is the recipe's")
        if transform is not None and teacher_cache is not None:
            raise ConfigError("a teacher_cache beside a transform; expected one of them: a view may change each time")
        objective, lessons = distilling(
            teacher, model, opened, recipe, preprocessing, place, team=team, kept=teacher_cache
        )
        for note in lessons.notes if lessons else ():
            warnings.warn(note, stacklevel=2)
    setup = Setup(
        model=model,
        data=opened,
        recipe=recipe,
        preprocessing=preprocessing,
        device=place,
        team=team,
        workers=workers,
        objective=objective or classify,
        transform=transform,
    )
    with run.owned() if run and team.first else nullcontext():
        state = last_state(run, team)
        planned = state.numbers.get("steps") if state else None
        steps = steps or (planned if type(planned) is int and planned > 0 else None)
        if steps is None and recipe.loop.minutes is not None:
            left = recipe.loop.minutes * 60 - (monotonic() - start)
            steps = measure(setup).steps_within(team.from_first(left), setup.order.steps, recipe.loop.eval_every)
        if recipe.loop.whiten:
            setup.whiten()
        training = setup.training(steps or setup.steps)
        torch.manual_seed(recipe.loop.seed * 1009 + team.rank + 1)  # dropout's, other than that of the starting weights
        sitting = Sitting(training, setup.data.val, run, workers, strict, watch or Several())
        with interrupts() as pressed:
            sitting.go_on_from(state)
            del state  # as large as the model and its optimizer
            sitting.run_all(setup.batches(range(training.done, training.steps)), pressed)
    skipped = set[str]().union(*team.all_of(sitting.skipped))
    return Fitted(training.result.eval(), training.done, sitting.evaluation, sitting.records, tuple(sorted(skipped)))


def last_state(run: Run | None, team: Team) -> State | None:
    """The checkpoint to resume from: the first process chooses it and renames damaged ones."""
    state = run.latest() if run and team.first else None
    path = team.from_first(state.path if state else None)
    return read_state(path) if path is not None and not team.first else state
