"""Callbacks of the training loop: terminal output, TensorBoard, or your own class with the same methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitrail.base.errors import missing_package_error
from vitrail.base.progress import NotebookBar, SlowLine, in_notebook
from vitrail.tasks.metric import COLLAPSED, Metric, format_metrics


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """Passed to `on_start` before the first step."""

    steps: int
    steps_per_epoch: int
    steps_done: int = 0  # more than 0 in a resumed run
    folder: Path | None = None
    metrics: tuple[Metric, ...] = ()  # of evaluations; the first one is shown
    unit: str = "images"  # of the speed
    shares: tuple[str, ...] = ("accuracy",)  # training metrics shown in per cent


UNIT_SYMBOLS = {"images": "img"}
LOOP_VALUES = ("step", "epoch", "loss", "lr", "seconds", COLLAPSED)  # of a record, not metrics of the task
MAX_SHOWN_METRICS = 4  # of training, on a line


@runtime_checkable
class Callback(Protocol):
    def on_start(self, start: TrainingStart) -> None: ...

    def on_step(self, step: int) -> None:
        """Called after each step, so it must be fast."""
        ...

    def on_log(self, record: Mapping[str, float]) -> None:
        """Called for each line of the log: it has `loss`, or after an evaluation `val_` and the name of each metric."""
        ...

    def on_finish(self) -> None: ...


def is_evaluation(record: Mapping[str, float]) -> bool:
    """Whether a record of the log has the metrics of an evaluation."""
    return any(name.startswith("val_") for name in record)


def format_record(record: Mapping[str, float], start: TrainingStart) -> str:
    """A record as one line."""
    words = [f"epoch {record['epoch']:.2f}", f"step {record['step']:.0f}"]
    if is_evaluation(record):
        values = {name.removeprefix("val_"): value for name, value in record.items() if name.startswith("val_")}
        first, *rest = format_metrics(start.metrics, values)
        words += [f"validation: {first}", *rest]
    else:
        speed = f"{start.unit}_per_second"
        names = [name for name in record if name not in (*LOOP_VALUES, speed)][:MAX_SHOWN_METRICS]
        words += [f"loss {record['loss']:.4f}"]
        words += [
            f"{name.replace('_', ' ')} {record[name]:{'.2%' if name in start.shares else '.4g'}}" for name in names
        ]
        words += [f"lr {record['lr']:.2e}", f"{record[speed]:.0f} {UNIT_SYMBOLS.get(start.unit, start.unit)}/s"]
    return "  ".join(words)


@dataclass
class TerminalCallback:
    """A progress bar below the results of each evaluation; without a terminal, a plain line now and then."""

    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    seconds_between_lines: float = 30.0  # without a terminal
    progress: Progress | None = None
    task: TaskID | None = None
    last_line_time: float = 0.0
    start: TrainingStart | None = None
    last_evaluation: SlowLine | None = None

    def on_start(self, start: TrainingStart) -> None:
        self.start = start
        if self.console.is_terminal:
            columns = (
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[now]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
            )
            self.progress = Progress(*columns, console=self.console, refresh_per_second=2)
            self.task = self.progress.add_task("", total=start.steps, completed=start.steps_done, epoch="0.00", now="")
            self.progress.start()
        self.last_line_time = monotonic()

    def on_step(self, step: int) -> None:
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=step)
        elif self.start is not None and step == self.start.steps:
            self.last_evaluation = SlowLine("evaluating after the last step …")

    def on_log(self, record: Mapping[str, float]) -> None:
        assert self.start is not None
        if is_evaluation(record):
            self.cancel_line()
        if is_evaluation(record):
            self.console.print(format_record(record, self.start))
        elif self.progress is not None and self.task is not None:
            _, _, now = format_record(record, self.start).partition("  step ")
            self.progress.update(self.task, epoch=f"{record['epoch']:.2f}", now=now.partition("  ")[2])
        elif monotonic() - self.last_line_time > self.seconds_between_lines:
            self.last_line_time = monotonic()
            self.console.print(format_record(record, self.start))

    def on_finish(self) -> None:
        self.cancel_line()
        if self.progress is not None:
            self.progress.stop()

    def cancel_line(self) -> None:
        if self.last_evaluation is not None:
            self.last_evaluation.cancel()


@dataclass
class NotebookCallback:
    """A progress bar in a notebook, with the results of the evaluations below it."""

    bar: NotebookBar | None = None
    step: int = 0
    note: str = ""
    evaluations: list[str] = field(default_factory=list[str])
    start: TrainingStart | None = None

    def on_start(self, start: TrainingStart) -> None:
        self.start = start
        self.step, self.bar = start.steps_done, NotebookBar(start.steps, "training", done=start.steps_done)

    def on_step(self, step: int) -> None:
        self.step = step
        self.update()

    def on_log(self, record: Mapping[str, float]) -> None:
        assert self.start is not None
        if is_evaluation(record):
            self.evaluations.append(format_record(record, self.start))
        else:
            self.note = f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}"
        self.update()

    def update(self) -> None:
        if self.bar is not None:
            self.bar.update(self.step, self.note, "\n".join(self.evaluations))

    def on_finish(self) -> None:
        if self.bar is not None:
            self.bar.close("\n".join(self.evaluations))


def open_progress_callback(show: bool | None) -> Callback | None:
    """The progress of `fit`: a bar in a notebook or on a terminal, plain lines elsewhere; False: none."""
    if show is False:
        return None
    return (
        NotebookCallback() if in_notebook() else TerminalCallback(Console(stderr=True, highlight=False, soft_wrap=True))
    )


@dataclass
class TensorBoardCallback:
    """Write scalars for TensorBoard; needs the extra `log`."""

    writer: Any = None

    def on_start(self, start: TrainingStart) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
        except ImportError:
            raise missing_package_error("a log for TensorBoard", "tensorboard", "log") from None
        if start.folder is not None:
            self.writer = SummaryWriter(str(start.folder / "tensorboard"), purge_step=start.steps_done + 1)

    def on_step(self, step: int) -> None:
        pass

    def on_log(self, record: Mapping[str, float]) -> None:
        if self.writer is not None:
            for name, value in record.items():
                if name not in ("step", "epoch", "seconds"):
                    part = "validation" if name.startswith("val_") else "training"
                    self.writer.add_scalar(f"{part}/{name.removeprefix('val_')}", value, int(record["step"]))

    def on_finish(self) -> None:
        if self.writer is not None:
            self.writer.close()


@dataclass(frozen=True)
class CallbackList:
    callbacks: Sequence[Callback] = ()

    def on_start(self, start: TrainingStart) -> None:
        for callback in self.callbacks:
            callback.on_start(start)

    def on_step(self, step: int) -> None:
        for callback in self.callbacks:
            callback.on_step(step)

    def on_log(self, record: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_log(record)

    def on_finish(self) -> None:
        for callback in self.callbacks:
            callback.on_finish()
