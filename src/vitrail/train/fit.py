"""`fit`: a model, data and a recipe put together and trained."""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from pathlib import Path
from time import monotonic
from typing import Any, cast

import torch
from torch import nn

from vitrail.data.augmentation import Augmentation
from vitrail.data.datasets import Data, Pictures, Subset, open_data
from vitrail.data.foreign import Dataset
from vitrail.data.loader import Order, Views, evaluation_batches, training_batches
from vitrail.data.mixing import normalise
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError, DataError
from vitrail.train.distributed import Team, device_of
from vitrail.train.losses import Objective, classify
from vitrail.train.recipe import Recipe
from vitrail.train.run import Run
from vitrail.train.sitting import Sitting, interrupts
from vitrail.train.speed import measure
from vitrail.train.tally import Evaluation
from vitrail.train.training import Training
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
    recipe: Recipe | None = None,
    *,
    objective: Objective = classify,
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
    are such), used in training in place of the recipe's augmentation. With `strict` an unreadable picture is an error.
    """
    start = monotonic()
    recipe, team, watch = recipe or Recipe(), team or Team(), watch or Several()
    found = open_data(data, seed=recipe.loop.seed)
    config: Any = model.config
    if config.classes != len(found.classes):
        raise ConfigError(
            f"a model of {config.classes} classes; expected {len(found.classes)}, as many as {found.name} has"
        )
    if preprocessing is None:
        grey = (0.5,) * config.channels
        preprocessing = Preprocessing(image_size=config.image_size, crop=1.0, mean=grey, std=grey)
    order = order_of(found, recipe, team)
    views = views_of(found, recipe, preprocessing, transform)
    if recipe.loop.early_size and not getattr(config, "dynamic", False):
        raise ConfigError(
            f"early_size is {recipe.loop.early_size}; expected 0, or a model that is dynamic: --set dynamic=true"
        )
    if recipe.loop.whiten:
        whiten(model, views.pictures, preprocessing)
    place = device_of(device, team)
    steps = steps or (run.steps_planned() if run else None)
    if steps is None and recipe.loop.minutes is not None:
        speed = measure(model, found, recipe, preprocessing, views, place, team, workers)
        left = recipe.loop.minutes * 60 - (monotonic() - start)
        steps = team.from_first(speed.steps_within(left, order.steps, recipe.loop.eval_every))
    steps = steps or total_steps(recipe, order)
    training = Training(
        model,
        recipe,
        steps=steps,
        steps_per_epoch=order.steps,
        classes=len(found.classes),
        preprocessing=preprocessing,
        objective=objective,
        device=place,
        team=team,
        log_every=max(1, min(50, order.steps // 10)),
    )
    torch.manual_seed(recipe.loop.seed * 1009 + team.rank + 1)  # dropout's, other than that of the starting weights
    sitting = Sitting(training, found.val, run, workers, strict, watch)
    sitting.go_on_from_last()
    with interrupts() as pressed:
        batches = training_batches(
            views,
            order,
            range(training.done, steps),
            accumulate=recipe.loop.accumulate,
            workers=workers,
            rank=team.rank,
            world=team.world,
            pin=training.device.type == "cuda",
        )
        sitting.run_all(batches, pressed)
    return Fitted(
        training.result.eval(), training.done, sitting.evaluation, sitting.records, tuple(sorted(sitting.skipped))
    )


def whiten(model: Any, pictures: Pictures, preprocessing: Preprocessing, count: int = 2000) -> None:
    """Lets the model's first layer see some of the pictures before training, if it can make something of them."""
    stem = getattr(model, "patch_embed", None)
    if not hasattr(stem, "whiten"):
        raise ConfigError(
            "whiten is true; expected false, or a model whose first layer can be whitened, such as cct_cpu_32"
        )
    some = Subset(pictures, range(min(count, len(pictures))))
    batches = evaluation_batches(some, preprocessing)
    cast(Any, stem).whiten(torch.cat([normalise(batch.images, preprocessing) for batch in batches]))


def order_of(data: Data, recipe: Recipe, team: Team) -> Order:
    pictures, loop = len(trained_on(data)), recipe.loop
    if loop.batch > pictures:
        raise ConfigError(f"batch {loop.batch} and {pictures} pictures to train on; expected at most so many: --batch")
    if loop.batch % (team.world * loop.accumulate):
        parts = f"{team.world} processes of {loop.accumulate} micro-batches"
        raise ConfigError(
            f"batch {loop.batch} over {parts}; expected equal parts: a multiple of {team.world * loop.accumulate}"
        )
    return Order(pictures=pictures, batch=loop.batch, repeats=recipe.augmentation.repeats, seed=loop.seed)


def views_of(
    data: Data, recipe: Recipe, preprocessing: Preprocessing, transform: Callable[[Any], Any] | None = None
) -> Views:
    return Views(
        pictures=trained_on(data),
        augmentation=Augmentation() if transform else recipe.augmentation,
        preprocessing=preprocessing,
        seed=recipe.loop.seed,
        replacing=True,
        transform=transform,
    )


def trained_on(data: Data) -> Pictures:
    if data.train is None or not len(data.train):
        raise DataError(f"{data.name} has no pictures to train on; expected some in train/")
    return data.train


def total_steps(recipe: Recipe, order: Order) -> int:
    return max(floor(recipe.loop.epochs * order.steps), 1)
