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

from vitrail.data.datasets import DatasetSplits, open_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.torch_dataset import TorchDataset
from vitrail.errors import ConfigError
from vitrail.train.callbacks import Callback, CallbackList
from vitrail.train.distillation import build_distillation
from vitrail.train.distributed import Ranks, resolve_device
from vitrail.train.evaluate import default_preprocessing
from vitrail.train.loop import TrainingLoop, catch_signals
from vitrail.train.losses import Objective, classification_loss
from vitrail.train.metrics import Evaluation
from vitrail.train.plan import Plan
from vitrail.train.recipe import Recipe, open_recipe
from vitrail.train.run_folder import RunFolder
from vitrail.train.teacher import Teacher
from vitrail.train.throughput import measure_throughput
from vitrail.train.training_state import TrainingState, read_training_state


@dataclass(frozen=True)
class FitResult:
    """What came out: the trained model is in eval mode, and the one given, or the average of its weights."""

    model: Any
    steps: int
    evaluation: Evaluation | None
    records: list[dict[str, float]]
    skipped: tuple[str, ...]  # why pictures could not be read


def fit(
    model: nn.Module,
    data: DatasetSplits | TorchDataset | str | Path,
    recipe: Recipe | str | None = None,
    *,
    objective: Objective | None = None,
    teacher: Teacher | str | Path | None = None,
    teacher_cache: Path | None = None,
    preprocessing: Preprocessing | None = None,
    transform: Callable[[Any], Any] | None = None,
    run: RunFolder | None = None,
    steps: int | None = None,
    device: str = "auto",
    workers: int = 0,
    strict: bool = False,
    ranks: Ranks | None = None,
    callback: Callback | None = None,
) -> FitResult:
    """Trains the model on the data by the recipe; goes on from the run's last checkpoint if it has one.

    `data` is what `open_data` takes, `transform` a function from a Pillow image to the model's input (torchvision's
    are such), used in training in place of the recipe's augmentation. With a `teacher` (its name as `vitrail distill`
    takes it, or a vitrail.Teacher) the loss is the recipe's distillation; `teacher_cache` is a folder that keeps its
    answers. With `strict` an unreadable picture is an error.
    """
    start, ranks = monotonic(), ranks or Ranks()
    recipe = open_recipe(recipe) if isinstance(recipe, str) else recipe or Recipe()
    if not isinstance(recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"recipe is a {type(recipe).__name__}; expected a name, or vitrail.open_recipe(…).changed(…)")
    if teacher is not None and transform is not None and preprocessing is None:
        raise ConfigError(
            "a teacher beside a transform, and no preprocessing; expected the mean and std that the transform ends "
            "with, as vitrail.Preprocessing(…), so that the teacher's own can take their place"
        )
    preprocessing, place = preprocessing or default_preprocessing(model), resolve_device(device, ranks)
    opened = open_data(data, seed=recipe.loop.seed)
    if teacher is not None:
        if objective is not None:
            raise ConfigError("an objective beside a teacher; expected one of them: the teacher's loss is the recipe's")
        if transform is not None and teacher_cache is not None:
            raise ConfigError("a teacher_cache beside a transform; expected one of them: a view may change each time")
        objective, lessons = build_distillation(
            teacher, model, opened, recipe, preprocessing, place, ranks=ranks, cache_folder=teacher_cache
        )
        for note in lessons.notes if lessons else ():
            warnings.warn(note, stacklevel=2)
    setup = Plan(
        model=model,
        data=opened,
        recipe=recipe,
        preprocessing=preprocessing,
        device=place,
        ranks=ranks,
        workers=workers,
        objective=objective or classification_loss,
        transform=transform,
    )
    with run.hold_lock() if run and ranks.is_first else nullcontext():
        state = load_resume_state(run, ranks)
        planned = state.metadata.get("steps") if state else None
        steps = steps or (planned if type(planned) is int and planned > 0 else None)
        if steps is None and recipe.loop.minutes is not None:
            left = recipe.loop.minutes * 60 - (monotonic() - start)
            steps = measure_throughput(setup).steps_within(
                ranks.broadcast_object(left), setup.sampler.steps_per_epoch, recipe.loop.eval_every
            )
        if recipe.loop.whiten:
            setup.whiten_first_layer()
        training = setup.create_trainer(steps or setup.steps)
        torch.manual_seed(
            recipe.loop.seed * 1009 + ranks.rank + 1
        )  # dropout's, other than that of the starting weights
        sitting = TrainingLoop(training, setup.data.val, run, workers, strict, callback or CallbackList())
        with catch_signals() as pressed:
            sitting.resume_from(state)
            del state  # as large as the model and its optimizer
            sitting.run_to_end(setup.load_batches(range(training.steps_done, training.steps)), pressed)
    skipped = set[str]().union(*ranks.all_gather_objects(sitting.skipped))
    return FitResult(
        training.trained_model.eval(), training.steps_done, sitting.evaluation, sitting.records, tuple(sorted(skipped))
    )


def load_resume_state(run: RunFolder | None, ranks: Ranks) -> TrainingState | None:
    """The checkpoint to resume from: the first process chooses it and renames damaged ones."""
    state = run.load_checkpoint_to_resume() if run and ranks.is_first else None
    path = ranks.broadcast_object(state.path if state else None)
    return read_training_state(path) if path is not None and not ranks.is_first else state
