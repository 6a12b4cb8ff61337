"""One sitting of a training: steps, evaluations, logs and checkpoints, until all is done or it is asked to stop."""

import errno
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch

from vitrail.data.datasets import Pictures
from vitrail.data.loader import Batch, is_worker_death
from vitrail.errors import CheckpointError, DataError, VitrailError, one_line
from vitrail.train.evaluate import evaluate
from vitrail.train.run import Run
from vitrail.train.state import State
from vitrail.train.tally import Evaluation
from vitrail.train.training import DivergedError, Training
from vitrail.train.watch import Several, Start, Watch

SHARE_OF_SAVING = 0.05  # of the time, at most, where the recipe does not say how often
MOST = 1000  # skipped pictures that a checkpoint remembers


class StoppedError(VitrailError):
    """The run was stopped by SIGTERM, Ctrl-C or a closed terminal; everything is saved."""

    def __init__(self, by: int, step: int, where: Path | None) -> None:
        saved = f"go on with: vitrail train --resume {where}" if where else "nothing is kept, since no folder was given"
        self.reason = f"stopped by {signal.Signals(by).name} after step {step}"
        super().__init__(f"{self.reason}; {saved}")
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

    def go_on_from(self, state: State | None) -> None:
        training = self.training
        if state:
            try:
                training.restore(state)
                self.begun -= float(state.numbers["seconds"])
                self.skipped = set(map(str, state.numbers.get("skipped", ())))
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"{state.path} does not fit the run: {type(error).__name__}: {one_line(error)}; "
                    "expected what `vitrail train` wrote"
                ) from None
        if self.run:
            if training.team.first:
                self.run.forget_after(training.done)
            self.records = [each for each in self.run.records() if each["step"] <= training.done]
        folder = self.run.folder if self.run else None
        self.watch.started(
            Start(steps=training.steps, steps_per_epoch=training.steps_per_epoch, done=training.done, folder=folder)
        )

    def run_all(self, batches: Iterator[Batch], pressed: list[int]) -> None:
        """Each step is logged, then saved, then evaluated: who stops it does not wait, and resuming evaluates first."""
        with self.report_dead_worker():
            self.take_steps(batches, pressed)

    def take_steps(self, batches: Iterator[Batch], pressed: list[int]) -> None:
        training = self.training
        try:
            self.evaluate_if_due()
            while training.done < training.steps:
                self.skip(training.step(batches))
                with self.ignore_closed_terminal():
                    self.watch.stepped(training.done)
                last = training.done == training.steps
                if last or training.done % training.log_every == 0:
                    self.log(self.observed())
                    training.window.clear()
                stop, save = self.agreed(pressed)
                if last or stop or save:
                    self.save()
                if stop and not last:
                    raise StoppedError(stop, training.done, self.run.folder if self.run else None)
                self.evaluate_if_due()
        finally:
            with self.ignore_closed_terminal():
                self.watch.finished()

    @contextmanager
    def ignore_closed_terminal(self) -> Generator[None]:
        """Writing to a closed terminal fails, which must not keep the run from being saved."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.watch = Several()

    @contextmanager
    def report_dead_worker(self) -> Generator[None]:
        """torch may report a killed data worker at any point, so the current step is not saved."""
        try:
            yield
        except Exception as error:
            if not is_worker_death(error):
                raise
            fewer = f"vitrail train --resume {self.run.folder} --workers {self.workers // 2}" if self.run else ""
            raise DataError(
                f"one of {self.workers} data workers was killed after step {self.training.done}, perhaps because "
                f"memory ran out; {self.kept()}; resume with fewer workers: {fewer or 'fit(…, workers=…), with a run'}"
            ) from None

    def observed(self) -> dict[str, float]:
        training, now = self.training, monotonic()
        count = (training.done - 1) % training.log_every + 1
        speed = count * training.recipe.loop.batch / max(now - self.logged, 1e-9)
        self.logged = now
        lr = training.optimizers[0].param_groups[-1]["lr"]
        with self.naming_what_is_kept():
            return {**training.observed(), "lr": lr, "images_per_second": round(speed, 1)}

    def check(self) -> None:
        """Before anything is made of the weights: they and the losses so far are numbers."""
        with self.naming_what_is_kept():
            if self.training.window:
                self.training.observed()
            self.training.check_weights()

    @contextmanager
    def naming_what_is_kept(self) -> Generator[None]:
        try:
            yield
        except (CheckpointError, DivergedError) as error:
            error.args = (f"{error}; {self.kept()}",)
            raise

    def kept(self) -> str:
        """The newest checkpoint that can be resumed from; only a verified one is called good."""
        state, _ = self.run.newest() if self.run else (None, {})
        if state is None:
            return "there is no checkpoint to resume from"
        return f"the last {'good ' if state.verified else ''}checkpoint is {state.path}"

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
                with self.naming_what_is_kept():
                    self.run.log(line)
            with self.ignore_closed_terminal():
                self.watch.logged(line)

    def evaluate_if_due(self) -> None:
        training = self.training
        last = training.done == training.steps
        known = any(each["step"] == training.done and "val_top1" in each for each in self.records)
        if self.val is None or not training.done or not (last or self.due(training.recipe.loop.eval_every)):
            return
        if known and not last:
            return
        self.check()
        training.team.alike(training.result)
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
        if not known:
            self.log({"val_loss": found.loss, "val_top1": found.top1, "val_top5": found.top5})
        self.logged = monotonic()

    def save(self) -> None:
        training, start = self.training, monotonic()
        if self.run is None:
            return
        self.check()
        numbers = {"steps": training.steps, "seconds": monotonic() - self.begun, "skipped": sorted(self.skipped)[:MOST]}
        state = training.state(numbers)
        if training.team.first:
            with self.naming_what_is_kept():
                self.run.save(state, training.done)
        self.saved = monotonic()
        self.saving = self.saved - start

    def skip(self, reasons: set[str]) -> None:
        if reasons and self.strict:
            raise DataError(min(reasons))
        self.skipped |= reasons


@contextmanager
def interrupts() -> Generator[list[int]]:
    """Signals received, handled between steps; a second Ctrl-C stops at once.

    A closed terminal (SIGHUP) counts too, unless that signal is ignored, as under nohup.
    """
    came = list[int]()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, _: object) -> None:
        came.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    hangup = getattr(signal, "SIGHUP", None)
    heeded = [] if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN else [hangup]
    before = {each: signal.signal(each, note) for each in (signal.SIGTERM, signal.SIGINT, *heeded)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
