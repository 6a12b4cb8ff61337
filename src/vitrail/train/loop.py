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

from vitrail.data.datasets import ImageDataset
from vitrail.data.loader import Batch, is_worker_death
from vitrail.errors import CheckpointError, DataError, VitrailError, describe_error
from vitrail.train.callbacks import Callback, CallbackList, TrainingStart
from vitrail.train.evaluate import evaluate
from vitrail.train.metrics import Evaluation
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import DivergedError, Trainer
from vitrail.train.training_state import TrainingState

MAX_SAVE_TIME_SHARE = 0.05  # of the time, at most, where the recipe does not say how often
MAX_SKIPPED_IN_CHECKPOINT = 1000  # skipped pictures that a checkpoint remembers


class StoppedError(VitrailError):
    """The run was stopped by SIGTERM, Ctrl-C or a closed terminal; everything is saved."""

    def __init__(self, signal_number: int, step: int, run_folder: Path | None) -> None:
        saved = (
            f"go on with: vitrail train --resume {run_folder}"
            if run_folder
            else "nothing is kept, since no folder was given"
        )
        self.reason = f"stopped by {signal.Signals(signal_number).name} after step {step}"
        super().__init__(f"{self.reason}; {saved}")
        self.exit_code = 128 + signal_number


@dataclass
class TrainingLoop:
    """The training and its surroundings."""

    trainer: Trainer
    val: ImageDataset | None
    run: RunFolder | None
    workers: int
    strict: bool
    callback: Callback
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    skipped: set[str] = field(default_factory=set[str])
    evaluation: Evaluation | None = None
    start_time: float = field(default_factory=monotonic)  # with the seconds of earlier sittings taken off
    last_log_time: float = field(default_factory=monotonic)
    last_save_time: float = field(default_factory=monotonic)
    save_seconds: float = 0.0  # seconds that the last checkpoint took

    def resume_from(self, state: TrainingState | None) -> None:
        training = self.trainer
        if state:
            try:
                training.restore_state(state)
                self.start_time -= float(state.metadata["seconds"])
                self.skipped = set(map(str, state.metadata.get("skipped", ())))
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"{state.path} does not fit the run: {type(error).__name__}: {describe_error(error)}; "
                    "expected what `vitrail train` wrote"
                ) from None
        if self.run:
            if training.ranks.is_first:
                self.run.truncate_log(training.steps_done)
            self.records = [each for each in self.run.read_records() if each["step"] <= training.steps_done]
        folder = self.run.folder if self.run else None
        self.callback.on_start(
            TrainingStart(
                steps=training.steps,
                steps_per_epoch=training.steps_per_epoch,
                steps_done=training.steps_done,
                folder=folder,
            )
        )

    def run_to_end(self, batches: Iterator[Batch], received_signals: list[int]) -> None:
        """Each step is logged, then saved, then evaluated: who stops it does not wait, and resuming evaluates first."""
        with self.report_dead_worker():
            self.run_steps(batches, received_signals)

    def run_steps(self, batches: Iterator[Batch], received_signals: list[int]) -> None:
        training = self.trainer
        try:
            self.evaluate_if_due()
            while training.steps_done < training.steps:
                self.add_skipped(training.step(batches))
                with self.ignore_closed_terminal():
                    self.callback.on_step(training.steps_done)
                last = training.steps_done == training.steps
                if last or training.steps_done % training.log_every == 0:
                    self.log_record(self.collect_metrics())
                    training.metric_window.clear()
                stop, save = self.agree_to_stop_or_save(received_signals)
                if last or stop or save:
                    self.save_checkpoint()
                if stop and not last:
                    raise StoppedError(stop, training.steps_done, self.run.folder if self.run else None)
                self.evaluate_if_due()
        finally:
            with self.ignore_closed_terminal():
                self.callback.on_finish()

    @contextmanager
    def ignore_closed_terminal(self) -> Generator[None]:
        """Writing to a closed terminal fails, which must not keep the run from being saved."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.callback = CallbackList()

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
                f"one of {self.workers} data workers was killed after step {self.trainer.steps_done}, perhaps because "
                f"memory ran out; {self.describe_last_checkpoint()}; resume with fewer workers: "
                f"{fewer or 'fit(…, workers=…), with a run'}"
            ) from None

    def collect_metrics(self) -> dict[str, float]:
        training, now = self.trainer, monotonic()
        count = (training.steps_done - 1) % training.log_every + 1
        speed = count * training.recipe.loop.batch / max(now - self.last_log_time, 1e-9)
        self.last_log_time = now
        lr = training.optimizers[0].param_groups[-1]["lr"]
        with self.add_last_checkpoint_to_error():
            return {**training.compute_mean_metrics(), "lr": lr, "images_per_second": round(speed, 1)}

    def check_finite(self) -> None:
        """Before anything is made of the weights: they and the losses so far are numbers."""
        with self.add_last_checkpoint_to_error():
            if self.trainer.metric_window:
                self.trainer.compute_mean_metrics()
            self.trainer.check_weights_finite()

    @contextmanager
    def add_last_checkpoint_to_error(self) -> Generator[None]:
        try:
            yield
        except (CheckpointError, DivergedError) as error:
            error.args = (f"{error}; {self.describe_last_checkpoint()}",)
            raise

    def describe_last_checkpoint(self) -> str:
        """The newest checkpoint that can be resumed from; only a verified one is called good."""
        state, _ = self.run.find_newest_checkpoint() if self.run else (None, {})
        if state is None:
            return "there is no checkpoint to resume from"
        return f"the last {'good ' if state.verified else ''}checkpoint is {state.path}"

    def is_epoch_multiple(self, epochs: int) -> bool:
        """Whether an epoch just ended after which there is something to do."""
        return bool(epochs) and self.trainer.steps_done % (epochs * self.trainer.steps_per_epoch) == 0

    def agree_to_stop_or_save(self, received_signals: list[int]) -> tuple[int, bool]:
        """The signal to stop by and whether to save, the same for all processes."""
        training, every = self.trainer, self.trainer.recipe.loop.save_every
        if every:
            save = training.steps_done % every == 0
        else:
            pause = max(self.save_seconds / MAX_SAVE_TIME_SHARE, 10.0)
            since = monotonic() - self.last_save_time
            save = since > (pause if self.is_epoch_multiple(1) else max(pause, 120.0))
        stop, first_saves = training.ranks.all_reduce_max(
            torch.tensor([received_signals[0] if received_signals else 0, int(save and training.ranks.is_first)])
        ).tolist()
        return int(stop), bool(first_saves)

    def log_record(self, record: dict[str, float]) -> None:
        training = self.trainer
        line = {
            "step": training.steps_done,
            "epoch": round(training.steps_done / training.steps_per_epoch, 4),
            **record,
            "seconds": round(monotonic() - self.start_time, 2),
        }
        self.records.append(line)
        if training.ranks.is_first:
            if self.run:
                with self.add_last_checkpoint_to_error():
                    self.run.append_to_log(line)
            with self.ignore_closed_terminal():
                self.callback.on_log(line)

    def evaluate_if_due(self) -> None:
        training = self.trainer
        last = training.steps_done == training.steps
        known = any(each["step"] == training.steps_done and "val_top1" in each for each in self.records)
        if (
            self.val is None
            or not training.steps_done
            or not (last or self.is_epoch_multiple(training.recipe.loop.eval_every))
        ):
            return
        if known and not last:
            return
        self.check_finite()
        training.ranks.broadcast_buffers(training.trained_model)
        found = evaluate(
            training.trained_model,
            self.val,
            training.preprocessing,
            batch=max(training.recipe.loop.batch // training.ranks.world_size // training.recipe.loop.accumulate, 1),
            workers=self.workers,
            device=training.device,
            ranks=training.ranks,
        )
        self.add_skipped(set(found.skipped))
        self.evaluation = found
        if not known:
            self.log_record({"val_loss": found.loss, "val_top1": found.top1, "val_top5": found.top5})
        self.last_log_time = monotonic()

    def save_checkpoint(self) -> None:
        training, start = self.trainer, monotonic()
        if self.run is None:
            return
        self.check_finite()
        numbers = {
            "steps": training.steps,
            "seconds": monotonic() - self.start_time,
            "skipped": sorted(self.skipped)[:MAX_SKIPPED_IN_CHECKPOINT],
        }
        state = training.get_state(numbers)
        if training.ranks.is_first:
            with self.add_last_checkpoint_to_error():
                self.run.save_checkpoint(state, training.steps_done)
        self.last_save_time = monotonic()
        self.save_seconds = self.last_save_time - start

    def add_skipped(self, reasons: set[str]) -> None:
        if reasons and self.strict:
            raise DataError(min(reasons))
        self.skipped |= reasons


@contextmanager
def catch_signals() -> Generator[list[int]]:
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
