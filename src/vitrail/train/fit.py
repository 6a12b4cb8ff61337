"""`fit`: train a model or a custom task on your data by a recipe. `vitrail train` shares everything below it."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitrail.base.errors import ConfigError
from vitrail.base.kinds import find_kind
from vitrail.base.machine import restore_threads
from vitrail.checkpoint.run_files import CURVES_FILE, PLAN_FILE
from vitrail.distributed import Ranks, resolve_device
from vitrail.models.base.checks import check_count
from vitrail.recipes.recipe import Recipe, open_recipe
from vitrail.tasks.classification import Classification, Objective
from vitrail.tasks.distillation import make_distillation
from vitrail.tasks.task import Source, Task, check_declarations, check_task, is_source
from vitrail.tasks.teacher import Teacher
from vitrail.train.callbacks import Callback, CallbackList, open_progress_callback
from vitrail.train.loop import FitResult, run_training
from vitrail.train.plan import Plan
from vitrail.train.plots import choose_metrics, plot_training_curves
from vitrail.train.run_folder import RunFolder
from vitrail.train.speed_choice import (
    choose_asked_or_recorded_threads,
    choose_recorded_precision,
    choose_speed,
    use_threads,
)

if TYPE_CHECKING:
    from vitrail.data.images.datasets import DatasetSplits, TorchDataset
    from vitrail.data.images.preprocessing import Preprocessing


def fit(
    model: nn.Module,
    data: "DatasetSplits | TorchDataset | Source | str | Path",
    recipe: Recipe | str | None = None,
    *,
    objective: Objective | None = None,
    teacher: Teacher | str | Path | None = None,
    teacher_cache: Path | None = None,
    preprocessing: "Preprocessing | None" = None,
    transform: Callable[[Any], Any] | None = None,
    run: RunFolder | Path | str | None = None,
    steps: int | None = None,
    device: str | torch.device = "auto",
    workers: int = 0,
    threads: int | None = None,
    strict: bool = False,
    ranks: Ranks | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    progress: bool | None = None,
) -> FitResult:
    """Train a model, or a custom task, on the data by the recipe; resume the run if it has a checkpoint.

    `data` is anything that `open_data` takes, or a Source, such as a TextSource of sentence pairs. `transform` maps a
    Pillow image to the model's input, as torchvision's transforms do, and replaces the recipe's augmentation. With a
    `teacher` (a name that `vitrail distill` takes, or a vitrail.Teacher) the loss is the recipe's distillation;
    `teacher_cache` is a folder for its logits. With `strict` an unreadable image is an error. `run` is a folder for the
    log and the checkpoints. `ranks` is the result of `join_process_group`, for several processes.

    By default, `threads` is measured in about a second on a copy of the model, as `vitrail train` does, from 1 to
    `torch.get_num_threads()`; a resumed run keeps its number, and the caller's is restored at the end. So is the
    recipe's `precision` auto; with a custom task or objective it is float32. Without
    `callbacks`, progress is shown: as a bar in a notebook and on a terminal, elsewhere as a line after each evaluation
    and every 30 seconds; `progress=False` shows nothing.

    >>> model = vitrail.create("vit_tiny_patch16_224", image_size=28, patch_size=7, channels=1, classes=10, depth=1)
    >>> vitrail.fit(model, "fashion", steps=2).steps
    2
    """
    start, ranks = monotonic(), ranks or Ranks()
    recipe = open_recipe(recipe) if isinstance(recipe, str) else recipe or Recipe()
    if not isinstance(recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(recipe).__name__
        raise ConfigError(f"recipe is a {kind}; expected a name, or vitrail.open_recipe(…).with_settings(…)")
    for name, count in (("steps", steps), ("threads", threads)):
        if count is not None:
            check_count(name, count)
    if not isinstance(run, RunFolder | Path | str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"`run` is {run!r}; expected a folder for the log and the checkpoints")
    shown = check_callbacks(callbacks)
    if isinstance(model, Task) and (objective is not None or teacher is not None):
        raise ConfigError("pass either a task, or a model with an objective or a teacher: a task has its own loss")
    if teacher is not None and objective is not None:
        raise ConfigError("pass either objective or teacher, not both: the teacher's loss is the recipe's")
    if teacher is not None and transform is not None:
        if preprocessing is None:
            raise ConfigError(
                "a teacher and a transform, but no preprocessing; expected the mean and std that the transform ends "
                "with, as vitrail.Preprocessing(…), so that the teacher's own can replace them"
            )
        if teacher_cache is not None:
            raise ConfigError("pass either teacher_cache or transform, not both: a view may change each time")
    task = model if isinstance(model, Task) else Classification(model, objective)
    own = objective is not None or not type(task).__module__.startswith("vitrail.")
    if own and recipe.loop.precision == "auto":  # a loss from outside may need float32
        recipe = recipe.with_settings({"precision": "float32"})
    if task is model:
        check_declarations(task)
    source: Any = data
    if not is_source(data):
        opening = find_kind(task.kind).open_source
        source = opening(task, data, recipe, preprocessing=preprocessing, transform=transform)
    resolved_device = resolve_device(device, ranks)
    if teacher is not None:
        check_task(task, source, recipe, ranks)
        task, notes = make_distillation(
            model, teacher, source, recipe, device=resolved_device, ranks=ranks, cache_folder=teacher_cache
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)
    plan = Plan(
        task=task,
        source=source,
        recipe=recipe,
        device=resolved_device,
        fixed_steps=steps,
        ranks=ranks,
        workers=workers,
        strict=strict,
    )
    if progress is not None or callbacks is None:
        bar = open_progress_callback(progress) if ranks.is_first else None
        shown = [each for each in (bar, *shown) if each is not None]
    with restore_threads():
        plan = choose_fit_speed(plan, run, threads)
        plan.task.initialize(source, recipe)
        if not isinstance(run, str | Path):
            return run_training(plan, run, CallbackList(shown), start=start)
        described = {"task": plan.describe_task(), "threads": plan.threads, "precision": plan.chosen_precision}
        folder = RunFolder.open_or_create(Path(run), ranks, described)
        result = run_training(plan, folder, CallbackList(shown), start=start)
    if ranks.is_first:
        shown = choose_metrics(task.metrics, result.records)
        plot_training_curves({folder.folder.name: result.records}, folder.folder / CURVES_FILE, *shown)
    return result


def choose_fit_speed(plan: Plan, run: RunFolder | Path | str | None, threads: int | None) -> Plan:
    """The plan with the threads that are given, else those of the run, else the fastest as measured now; its precision.

    They are the same for all processes.
    """
    asked = "auto" if threads is None else threads
    if run is None:
        return choose_speed(plan, asked)[0]
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    known = plan.ranks.broadcast_object(folder.load_plan() if (folder.folder / PLAN_FILE).exists() else None)
    if known is None and folder is not run:
        return choose_speed(plan, asked)[0]
    where, known = str(folder.folder), known or {}  # a RunFolder records neither
    plan = use_threads(plan, choose_asked_or_recorded_threads(known, asked, where))
    return choose_recorded_precision(plan, known, where)


def check_callbacks(given: Callback | Sequence[Callback] | None) -> list[Callback]:
    """One callback, several or none as a list."""
    found: list[Any] = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    for each in found:
        if not isinstance(each, Callback):
            raise ConfigError(f"a callback is a {type(each).__name__}; expected on_start, on_step, on_log, on_finish")
    return found
