"""One sitting of a training: steps, evaluations, logs and checkpoints, until all is done or it is asked to stop."""

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch

from vitrail.data.datasets import Pictures
from vitrail.data.loader import Batch
from vitrail.errors import CheckpointError, DataError, VitrailError
from vitrail.train.evaluate import evaluate
from vitrail.train.run import Run
from vitrail.train.tally import Evaluation
from vitrail.train.training import DivergedError, Training
from vitrail.train.watch import Start, Watch

SHARE_OF_SAVING = 0.05  # of the time, at most, where the recipe does not say how often


class StoppedError(VitrailError):
    """Somebody sent SIGTERM or pressed Ctrl-C; everything is saved."""

    def __init__(self, by: int, step: int, where: Path | None) -> None:
        saved = f"go on with: vitrail train --resume {where}" if where else "nothing is kept, since no folder was given"
        super().__init__(f"stopped by {signal.Signals(by).name} after step {step}; {saved}")
        self.exit_code = 128 + by


@dataclass
class Sitting:
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
            raise VitrailError(f"{error}; {self.kept()}") from None

    def kept(self) -> str:
        states = self.run.states() if self.run else []
        return f"the last good checkpoint is {states[-1]}" if states else "there is no checkpoint yet"

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
        state = training.state({"steps": training.steps, "seconds": monotonic() - self.begun})
        if training.team.first:
            try:
                self.run.save(state, training.done)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {self.kept()}") from error
        self.saved = monotonic()
        self.saving = self.saved - start

    def skip(self, reasons: set[str]) -> None:
        if reasons and self.strict:
            raise DataError(min(reasons))
        self.skipped |= reasons


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
