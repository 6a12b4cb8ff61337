"""The one loop: steps, evaluations, logs and checkpoints, until all is done or somebody asks it to stop."""

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from time import monotonic
from typing import Any, cast

import torch
from torch import nn

from vitrail.data.augmentation import Augmentation
from vitrail.data.datasets import Data, Pictures, Subset, open_data
from vitrail.data.foreign import Dataset
from vitrail.data.loader import Batch, Order, Views, evaluation_batches, training_batches
from vitrail.data.mixing import normalise
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, ConfigError, DataError, VitrailError
from vitrail.train.distributed import Team, device_of
from vitrail.train.evaluate import evaluate
from vitrail.train.losses import Objective, classify
from vitrail.train.recipe import Recipe
from vitrail.train.run import Run
from vitrail.train.tally import Evaluation
from vitrail.train.training import DivergedError, Training
from vitrail.train.watch import Several, Start, Watch

SHARE_OF_SAVING = 0.05  # of the time, at most, where the recipe does not say how often


@dataclass(frozen=True)
class Fitted:
    """What came out: the trained model is in eval mode, and the one given, or the average of its weights."""

    model: Any
    steps: int
    evaluation: Evaluation | None
    records: list[dict[str, float]]
    skipped: tuple[str, ...]  # why pictures could not be read


class StoppedError(VitrailError):
    """Somebody sent SIGTERM or pressed Ctrl-C; everything is saved."""

    def __init__(self, by: int, step: int, where: Path | None) -> None:
        saved = f"go on with: vitrail train --resume {where}" if where else "nothing is kept, since no folder was given"
        super().__init__(f"stopped by {signal.Signals(by).name} after step {step}; {saved}")
        self.exit_code = 128 + by


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
    recipe, team, watch = recipe or Recipe(), team or Team(), watch or Several()
    found = open_data(data, seed=recipe.loop.seed)
    config: Any = model.config
    if config.classes != len(found.classes):
        raise ConfigError(
            f"a model of {config.classes} classes; expected {len(found.classes)}, as many as {found.name} has"
        )
    preprocessing = preprocessing or Preprocessing(image_size=config.image_size, crop=1.0)
    order = order_of(found, recipe, team)
    views = views_of(found, recipe, preprocessing, transform)
    if recipe.loop.early_size and not getattr(config, "dynamic", False):
        raise ConfigError(
            f"early_size is {recipe.loop.early_size}; expected 0, or a model that is dynamic: --set dynamic=true"
        )
    if recipe.loop.whiten:
        whiten(model, views.pictures, preprocessing)
    steps = steps or total_steps(recipe, order)
    training = Training(
        model,
        recipe,
        steps=steps,
        steps_per_epoch=order.steps,
        classes=len(found.classes),
        preprocessing=preprocessing,
        objective=objective,
        device=device_of(device, team),
        team=team,
        log_every=max(1, min(50, order.steps // 10)),
    )
    torch.manual_seed(recipe.loop.seed * 1009 + team.rank + 1)  # dropout's, other than that of the starting weights
    loop = Loop(training, found.val, run, workers, strict, watch)
    loop.go_on_from_last()
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
        loop.run_all(batches, pressed)
    return Fitted(training.result.eval(), training.done, loop.evaluation, loop.records, tuple(sorted(loop.skipped)))


@dataclass
class Loop:
    """The training and its surroundings."""

    training: Training
    val: Pictures | None
    run: Run | None
    workers: int
    strict: bool
    watch: Watch
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    skipped: set[str] = field(default_factory=set[str])
    evaluation: Evaluation | None = None
    begun: float = field(default_factory=monotonic)  # with the seconds of earlier sittings taken off
    logged: float = field(default_factory=monotonic)
    saved: float = field(default_factory=monotonic)
    saving: float = 0.0  # seconds that the last checkpoint took

    def go_on_from_last(self) -> None:
        training = self.training
        state = self.run.latest() if self.run else None
        if self.run and state:
            training.restore(state)
            self.begun -= float(state.numbers["seconds"])
            if training.team.first:
                self.run.forget_after(training.done)
            self.records = [each for each in self.run.records() if each["step"] <= training.done]
        folder = self.run.folder if self.run else None
        self.watch.started(
            Start(steps=training.steps, steps_per_epoch=training.steps_per_epoch, done=training.done, folder=folder)
        )

    def run_all(self, batches: Iterator[Batch], pressed: list[int]) -> None:
        training = self.training
        try:
            while training.done < training.steps:
                self.skip(training.step(batches))
                self.watch.stepped(training.done)
                last = training.done == training.steps
                if last or training.done % training.log_every == 0:
                    self.log(self.observed())
                    training.window.clear()
                if last or self.due(training.recipe.loop.eval_every):
                    self.evaluate()
                stop, save = self.agreed(pressed)
                if last or stop or save:
                    self.save()
                if stop and not last:
                    raise StoppedError(stop, training.done, self.run.folder if self.run else None)
        finally:
            self.watch.finished()

    def observed(self) -> dict[str, float]:
        training, now = self.training, monotonic()
        count = (training.done - 1) % training.log_every + 1
        speed = count * training.recipe.loop.batch / max(now - self.logged, 1e-9)
        self.logged = now
        lr = training.optimizers[0].param_groups[-1]["lr"]
        return {**self.checked(), "lr": lr, "images_per_second": round(speed, 1)}

    def checked(self) -> dict[str, float]:
        """The means so far, if they are numbers."""
        try:
            return self.training.observed()
        except DivergedError as error:
            states = self.run.states() if self.run else []
            kept = f"the last good checkpoint is {states[-1]}" if states else "there is no checkpoint yet"
            raise VitrailError(f"{error}; {kept}") from None

    def due(self, epochs: int) -> bool:
        """Whether an epoch just ended after which there is something to do."""
        return bool(epochs) and self.training.done % (epochs * self.training.steps_per_epoch) == 0

    def agreed(self, pressed: list[int]) -> tuple[int, bool]:
        """The signal to stop by and whether to save, the same for all processes."""
        training, every = self.training, self.training.recipe.loop.save_every
        if every:
            save = training.done % every == 0
        else:
            pause = max(self.saving / SHARE_OF_SAVING, 10.0)
            since = monotonic() - self.saved
            save = since > (pause if self.due(1) else max(pause, 120.0))
        stop, first_saves = training.team.largest(
            torch.tensor([pressed[0] if pressed else 0, int(save and training.team.first)])
        ).tolist()
        return int(stop), bool(first_saves)

    def log(self, record: dict[str, float]) -> None:
        training = self.training
        line = {
            "step": training.done,
            "epoch": round(training.done / training.steps_per_epoch, 4),
            **record,
            "seconds": round(monotonic() - self.begun, 2),
        }
        self.records.append(line)
        if training.team.first:
            if self.run:
                self.run.log(line)
            self.watch.logged(line)

    def evaluate(self) -> None:
        if self.val is None:
            return
        training = self.training
        found = evaluate(
            training.result,
            self.val,
            training.preprocessing,
            batch=max(training.recipe.loop.batch // training.team.world // training.recipe.loop.accumulate, 1),
            workers=self.workers,
            device=training.device,
            team=training.team,
        )
        self.skip(set(found.skipped))
        self.evaluation = found
        self.log({"val_loss": found.loss, "val_top1": found.top1, "val_top5": found.top5})
        self.logged = monotonic()

    def save(self) -> None:
        training, start = self.training, monotonic()
        if self.run is None:
            return
        if training.window:
            self.checked()
        state = training.state({"seconds": monotonic() - self.begun})
        if training.team.first:
            try:
                self.run.save(state, training.done)
            except CheckpointError as error:
                states = self.run.states()
                kept = f"the last good checkpoint is {states[-1]}" if states else "there is no checkpoint yet"
                raise CheckpointError(f"{error}; {kept}") from error
        self.saved = monotonic()
        self.saving = self.saved - start

    def skip(self, reasons: set[str]) -> None:
        if reasons and self.strict:
            raise DataError(min(reasons))
        self.skipped |= reasons


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


@contextmanager
def interrupts() -> Generator[list[int]]:
    """Signals that came, to be looked at between steps; a second one of a kind does what it always does."""
    came = list[int]()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, _: object) -> None:
        came.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {each: signal.signal(each, note) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
