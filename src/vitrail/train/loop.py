"""The training loop: steps, evaluations, logs and checkpoints, until the last step or a signal to stop."""

import errno
import signal
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from vitrail.base.errors import CheckpointError, DataError, VitrailError
from vitrail.checkpoint.run_files import BEST_FOLDER
from vitrail.data.batch import wrap_dead_worker_errors
from vitrail.distributed import wrap_lost_rank_errors
from vitrail.tasks.metric import COLLAPSED, CollapsedError, CollapseWarning, CollapseWatch, check_evaluation_metrics
from vitrail.tasks.task import EvaluationResult, check_evaluation_result
from vitrail.train.callbacks import Callback, CallbackList, TrainingStart, is_evaluation
from vitrail.train.plan import Plan
from vitrail.train.restore import (
    ResumePoint,
    load_newest_checkpoint_on_ranks,
    read_newest_checkpoint_and_damage,
    restore_training,
)
from vitrail.train.run_folder import RunFolder
from vitrail.train.throughput import fix_steps_by_minutes
from vitrail.train.trainer import DivergedError, Trainer

MAX_SAVE_TIME_SHARE = 0.05  # of the training time, if `save_every` is 0
MIN_EXAMPLES_OF_SIGNS = 4  # fewer have similar features, or use few prototypes, by chance; one has no spread
MAX_SKIPPED_IN_CHECKPOINT = 1000  # skipped examples that a checkpoint records


@dataclass(frozen=True)
class FitResult:
    """The trained model in eval mode: the one given, or the moving average of its weights."""

    model: Any
    steps: int
    evaluation: Any  # an EvaluationResult: for classification an Evaluation; None without validation examples
    records: list[dict[str, float]]
    skipped: tuple[str, ...]  # why examples could not be read
    threads: int | None = None  # CPU threads; None: torch's number

    def __repr__(self) -> str:
        result = "not evaluated" if self.evaluation is None else self.evaluation.format_headline()
        return f"FitResult({type(self.model).__name__} after {self.steps:,} step{'s' * (self.steps != 1)}, {result})"


def run_training(
    plan: Plan, run: RunFolder | None = None, callback: Callback | None = None, *, start: float | None = None
) -> FitResult:
    """Train a task that is initialized to the end, from the newest checkpoint of the run if it has one.

    A budget of minutes counts from `start`, a value of `monotonic()`.
    """
    start, ranks = monotonic() if start is None else start, plan.ranks
    if run and plan.recipe.loop.keep_best:
        plan.check_model_can_be_written()
    with run.hold_lock() if run and ranks.is_first else nullcontext():
        state = load_newest_checkpoint_on_ranks(run, ranks) if run else None
        if plan.fixed_steps is None:
            planned = state.metadata.get("steps") if state else None
            known = type(planned) is int and planned > 0
            plan = plan.with_steps(planned) if known else fix_steps_by_minutes(plan, start)
        trainer = Trainer(plan)
        torch.manual_seed(plan.recipe.loop.seed * 1009 + ranks.rank + 1)  # for dropout, not for initial weights
        loop = TrainingLoop(plan, trainer, run, callback or CallbackList())
        with collect_stop_signals() as received_signals:
            loop.start(restore_training(trainer, state, run))
            del state  # as large as the model and its optimizer
            lost = loop.describe_lost_steps
            with wrap_dead_worker_errors(plan.workers, lost), wrap_lost_rank_errors(ranks, lost):
                loop.run_steps(received_signals)
    skipped = set[str]().union(*ranks.all_gather_objects(loop.skipped))
    return FitResult(
        trainer.finish(), trainer.steps_done, loop.evaluation, loop.records, tuple(sorted(skipped)), plan.threads
    )


class StoppedError(VitrailError):
    """The run was stopped by SIGTERM, Ctrl-C or a closed terminal; everything is saved."""

    def __init__(self, signal_number: int, step: int, run_folder: Path | None) -> None:
        saved = (
            f"continue with `resume` {run_folder}" if run_folder else "nothing is saved, since there is no run folder"
        )
        self.reason = f"stopped by {signal.Signals(signal_number).name} after step {step}"
        super().__init__(f"{self.reason}; {saved}")
        self.exit_code = 128 + signal_number


@dataclass
class TrainingLoop:
    """A trainer with its log, evaluations and checkpoints."""

    plan: Plan
    trainer: Trainer
    run: RunFolder | None
    callback: Callback
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    skipped: set[str] = field(default_factory=set[str])
    evaluation: EvaluationResult | None = None
    start_time: float = field(default_factory=monotonic)  # moved back by the time before the last resume
    last_log_time: float = field(default_factory=monotonic)
    last_save_time: float = field(default_factory=monotonic)
    save_seconds: float = 0.0  # time to write the last checkpoint
    collapse_watch: CollapseWatch = field(default_factory=CollapseWatch)

    def start(self, point: ResumePoint) -> None:
        self.start_time -= point.seconds
        self.skipped, self.records = set(point.skipped), list(point.records)
        signs = self.trainer.task.collapse_signs if self.examples_per_forward >= MIN_EXAMPLES_OF_SIGNS else ()
        self.collapse_watch = CollapseWatch(signs, self.trainer.warmup_steps)
        for record in self.records:  # a collapse before a resume is not reported again
            found = self.collapse_watch.find_collapse(record)
            if found and self.plan.recipe.loop.stop_on_collapse:
                raise CollapsedError(found)
        self.collapse_watch.reported |= any(COLLAPSED in record for record in self.records)
        self.callback.on_start(
            TrainingStart(
                steps=self.trainer.steps,
                steps_per_epoch=self.trainer.steps_per_epoch,
                steps_done=self.trainer.steps_done,
                folder=self.run.folder if self.run else None,
                metrics=self.trainer.task.metrics,
                unit=self.trainer.task.unit,
                shares=self.trainer.task.shares,
            )
        )

    def run_steps(self, received_signals: list[int]) -> None:
        """Each step is logged, then saved, then evaluated, so that stopping is quick; resuming evaluates first."""
        trainer = self.trainer
        batches = self.plan.load_batches(range(trainer.steps_done, trainer.steps))
        try:
            self.evaluate_if_due()
            while trainer.steps_done < trainer.steps and not self.has_lost_patience:
                self.add_skipped(trainer.step(batches))
                with self.ignore_closed_terminal():
                    self.callback.on_step(trainer.steps_done)
                last, collapse = trainer.steps_done == trainer.steps, None
                if last or trainer.steps_done % trainer.log_every == 0:
                    collapse = self.log_training()
                stop, save = self.agree_to_stop_or_save(received_signals)
                if last or stop or save or collapse:
                    self.save_checkpoint()
                if collapse:
                    with self.add_last_checkpoint_to_error():
                        raise CollapsedError(collapse)
                if stop and not last:
                    raise StoppedError(stop, trainer.steps_done, self.run.folder if self.run else None)
                self.evaluate_if_due()
            if trainer.steps_done < trainer.steps:
                self.stop_early()
        finally:
            with self.ignore_closed_terminal():
                self.callback.on_finish()

    @property
    def has_lost_patience(self) -> bool:
        """Whether the last `patience` evaluations were not better than one before; known from the log alone."""
        patience, metric = self.trainer.recipe.loop.patience, self.trainer.task.metrics[0]
        return bool(patience) and metric.count_since_best(self.list_evaluations(metric.name)) >= patience

    def list_evaluations(self, metric: str) -> list[float]:
        return [each[name] for each in self.records if (name := f"val_{metric}") in each]

    def stop_early(self) -> None:
        """End the run here: the last evaluation is repeated, since a task may measure more at the end."""
        self.save_checkpoint()
        self.trainer.steps = self.trainer.steps_done
        self.evaluate_if_due()

    @contextmanager
    def ignore_closed_terminal(self) -> Generator[None]:
        """Writing to a closed terminal fails, which must not keep the run from being saved."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.callback = CallbackList()

    def describe_lost_steps(self) -> str:
        """torch may report a killed data worker at any point, so the current step is not saved."""
        resume = f": continue with `resume` {self.run.folder}" if self.run else ""
        return f"; training stopped after step {self.trainer.steps_done}, {self.describe_last_checkpoint()}{resume}"

    def collect_metrics(self) -> dict[str, float]:
        trainer, now = self.trainer, monotonic()
        speed = trainer.units_since_log / max(now - self.last_log_time, 1e-9)
        self.last_log_time, trainer.units_since_log = now, 0
        lr = trainer.optimizers[0].param_groups[-1]["lr"]
        with self.add_last_checkpoint_to_error():
            return {**trainer.compute_mean_metrics(), "lr": lr, f"{trainer.task.unit}_per_second": round(speed, 1)}

    def check_finite(self) -> None:
        """Check the weights and the losses so far before they are evaluated or saved."""
        with self.add_last_checkpoint_to_error():
            if self.trainer.metric_window:
                self.trainer.compute_mean_metrics()
            self.trainer.check_weights_finite()

    @contextmanager
    def add_last_checkpoint_to_error(self) -> Generator[None]:
        try:
            yield
        except (CheckpointError, CollapsedError, DivergedError) as error:
            error.args = (f"{error}; {self.describe_last_checkpoint()}",)
            raise

    def describe_last_checkpoint(self) -> str:
        """The newest checkpoint that can be resumed from; only a verified one is called good."""
        state, _ = read_newest_checkpoint_and_damage(self.run) if self.run else (None, {})
        if state is None:
            return "there is no checkpoint to resume from"
        return f"the last {'good ' if state.verified else ''}checkpoint is {state.path}"

    @property
    def examples_per_forward(self) -> int:
        """Examples of a micro-batch of one process."""
        loop = self.trainer.recipe.loop
        return loop.batch // self.trainer.ranks.world_size // loop.accumulate

    def is_epoch_multiple(self, epochs: int) -> bool:
        """Whether a multiple of `epochs` epochs has just ended; never for 0."""
        return bool(epochs) and self.trainer.steps_done % (epochs * self.trainer.steps_per_epoch) == 0

    def agree_to_stop_or_save(self, received_signals: list[int]) -> tuple[int, bool]:
        """The signal to stop by and whether to save, the same for all processes."""
        trainer, every = self.trainer, self.trainer.recipe.loop.save_every
        if every:
            save = trainer.steps_done % every == 0
        else:
            pause = max(self.save_seconds / MAX_SAVE_TIME_SHARE, 10.0)
            since = monotonic() - self.last_save_time
            save = since > (pause if self.is_epoch_multiple(1) else max(pause, 120.0))
        stop, first_saves = trainer.ranks.all_reduce_max(
            torch.tensor([received_signals[0] if received_signals else 0, int(save and trainer.ranks.is_first)])
        ).tolist()
        return int(stop), bool(first_saves)

    def log_training(self) -> str | None:
        """Log the metrics since the last log. Warn once of a collapse, or return it if it must stop the run."""
        record = self.collect_metrics()
        found = self.collapse_watch.find_collapse({**record, "step": self.trainer.steps_done})
        self.log_record({**record, COLLAPSED: 1.0} if found else record)
        self.trainer.clear_metrics()
        if found and not self.plan.recipe.loop.stop_on_collapse:
            if self.trainer.ranks.is_first:
                warnings.warn(found, CollapseWarning, stacklevel=2)
            return None
        return found

    def log_record(self, record: dict[str, float]) -> None:
        trainer = self.trainer
        line = {
            "step": trainer.steps_done,
            "epoch": round(trainer.steps_done / trainer.steps_per_epoch, 4),
            **record,
            "seconds": round(monotonic() - self.start_time, 2),
        }
        self.records.append(line)
        if trainer.ranks.is_first:
            if self.run:
                with self.add_last_checkpoint_to_error():
                    self.run.append_to_log(line)
            with self.ignore_closed_terminal():
                self.callback.on_log(line)

    def evaluate_if_due(self) -> None:
        trainer = self.trainer
        last = trainer.steps_done == trainer.steps
        known = {
            name for each in self.records if each["step"] == trainer.steps_done for name in each if is_evaluation(each)
        }
        due = last or (self.is_epoch_multiple(trainer.recipe.loop.eval_every) and not known)
        if not self.plan.source.validation_count or not trainer.steps_done or not due:
            return
        self.check_finite()
        trainer.ranks.broadcast_buffers(trainer.trained_task)
        found = trainer.trained_task.evaluate(
            self.plan.source,
            trainer.clock,
            batch=max(self.examples_per_forward, 1),
            workers=self.plan.workers,
            device=trainer.device,
        )
        check_evaluation_result(type(trainer.task).__name__, found)
        self.add_skipped(set(found.skipped))
        self.evaluation = found
        if not known:
            check_evaluation_metrics(type(trainer.task).__name__, trainer.task.metrics, found.metrics)
            if trainer.recipe.loop.keep_best and self.is_best(found):
                self.keep_best_model(found)  # before the log, so that a run that is killed here evaluates again
        values = {f"val_{name}": value for name, value in found.metrics.items()}
        if new := {name: value for name, value in values.items() if name not in known}:
            self.log_record(new)
        self.last_log_time = monotonic()

    def is_best(self, found: EvaluationResult) -> bool:
        """Whether no evaluation in the log is better by the first metric of the task."""
        metric = self.trainer.task.metrics[0]
        value = found.metrics[metric.name]
        return metric.choose_best([*self.list_evaluations(metric.name), value]) == value

    def keep_best_model(self, found: EvaluationResult) -> None:
        if self.run is not None and self.trainer.ranks.is_first:
            with self.add_last_checkpoint_to_error():
                self.plan.write_model(self.trainer.trained_task.result, self.run.folder / BEST_FOLDER, found)

    def save_checkpoint(self) -> None:
        trainer, start = self.trainer, monotonic()
        if self.run is None:
            return
        self.check_finite()
        numbers = {
            "steps": trainer.steps,
            "seconds": monotonic() - self.start_time,
            "skipped": sorted(self.skipped)[:MAX_SKIPPED_IN_CHECKPOINT],
        }
        state = trainer.get_state(numbers)
        if trainer.ranks.is_first:
            with self.add_last_checkpoint_to_error():
                self.run.save_checkpoint(state, trainer.steps_done)
        self.last_save_time = monotonic()
        self.save_seconds = self.last_save_time - start

    def add_skipped(self, reasons: set[str]) -> None:
        if reasons and self.plan.strict:
            raise DataError(min(reasons))
        self.skipped |= reasons


@contextmanager
def collect_stop_signals() -> Generator[list[int]]:
    """Collect signals, to be handled between steps; a second Ctrl-C stops at once.

    A closed terminal (SIGHUP) counts too, unless that signal is ignored, as under nohup.
    """
    received = list[int]()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def record_signal(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    hangups = [] if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN else [hangup]
    before = {each: signal.signal(each, record_signal) for each in (signal.SIGTERM, signal.SIGINT, *hangups)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
