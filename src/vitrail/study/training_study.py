"""Trainings that are compared, in an ablation or a study of positions: their state on disk, results and figure."""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from vitrail.base.errors import CheckpointError, ConfigError, VitrailError
from vitrail.base.figures import new_figure, sanitize_label, save_figure, style_axes, wrap_label
from vitrail.base.files import write_json
from vitrail.base.style import BLUE, FIGURE_WIDTH, GRAY, LABEL_POINTS, RED, TITLE_POINTS
from vitrail.base.table import Cell, Column, Mean, Shown, Table
from vitrail.checkpoint.run_files import PLAN_FILE, is_run_finished
from vitrail.distributed import join_process_group
from vitrail.recipes.request import Request
from vitrail.tasks.metric import Metric
from vitrail.tasks.teacher import Teacher
from vitrail.train.loop import StoppedError
from vitrail.train.plan import Runtime
from vitrail.train.resume import resume_run
from vitrail.train.run import start_run
from vitrail.train.run_folder import RUNS_FOLDER, RunFolder
from vitrail.train.run_list import RecordedTask, read_run_summary
from vitrail.train.trainer import DivergedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class AblationVariant:
    """A row of the table: training runs that differ in the seed alone."""

    name: str
    request: Request  # with the first seed
    # differences by name: the value of the full row and its own
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    unchanged_text: str = "the full recipe"  # description without differences

    def request_for_seed(self, seed: int) -> Request:
        return replace(self.request, recipe=self.request.recipe.with_settings({"seed": seed}))

    @property
    def description(self) -> str:
        changed = [
            f"{name} {format_value(before)} → {format_value(now)}" for name, (before, now) in self.changes.items()
        ]
        return ", ".join(changed) or self.unchanged_text


def format_value(value: object) -> str:
    if isinstance(value, bool | None):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def json_round_trip(value: Any) -> Any:
    """The value as read back from a JSON file."""
    return json.loads(json.dumps(value))


class OtherSettingsError(ConfigError):
    """The folder of a run holds one that was trained with other settings."""


@dataclass(frozen=True, kw_only=True)
class AblationRun:
    row: AblationVariant
    seed: int
    folder: Path
    request: Request
    state: Literal["new", "stopped", "finished"]


def find_study_folder(
    name: str, rows: Sequence[AblationVariant], seeds: Sequence[int], teacher: Teacher | None = None
) -> Path:
    """The first of runs/NAME, runs/NAME-2, … without runs of other settings, so that the same command resumes."""
    folders = (RUNS_FOLDER / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(folder for folder in folders if not has_other_settings(folder, rows, seeds, teacher))


def has_other_settings(
    folder: Path, rows: Sequence[AblationVariant], seeds: Sequence[int], teacher: Teacher | None
) -> bool:
    try:
        list_ablation_runs(rows, seeds, folder, teacher)
    except OtherSettingsError:
        return True
    return False


def list_ablation_runs(
    rows: Sequence[AblationVariant], seeds: Sequence[int], folder: Path, teacher: Teacher | None = None
) -> list[AblationRun]:
    """All training runs, row by row, with their state on disk."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the runs")
    if (folder / PLAN_FILE).exists():
        raise CheckpointError(f"{folder} is a run itself; expected a folder for several runs")
    runs = list[AblationRun]()
    for row in rows:
        for seed in seeds:
            place, request = folder / f"{row.name}-{seed}", row.request_for_seed(seed)
            state = find_run_state(place, request)
            if state != "new" and request.teacher is not None and teacher is not None:
                check_run_teacher_unchanged(place, teacher)
            runs.append(AblationRun(row=row, seed=seed, folder=place, request=request, state=state))
    return runs


def find_run_state(folder: Path, request: Request) -> Literal["new", "stopped", "finished"]:
    """State of a run's folder; an error if it has trained with other settings."""
    if not (folder / PLAN_FILE).exists():
        RunFolder.check_folder_is_free(folder)
        return "new"
    run = RunFolder(folder)
    before = Request.from_json(run.load_plan().get("request"), str(folder))
    difference = describe_difference(before, request)
    if difference and not (run.list_checkpoints() or run.read_records() or is_run_finished(folder)):
        return "new"
    if difference:
        raise OtherSettingsError(
            f"{folder} was trained with other settings: {difference}; use the same, or another `out`"
        )
    return "finished" if is_run_finished(folder) else "stopped"


def check_run_teacher_unchanged(folder: Path, teacher: Teacher) -> None:
    """Check that all rows have the same teacher, also if its file has changed since."""
    before: Any = RunFolder(folder).load_plan().get("teacher")
    if isinstance(before, dict) and before.get("fingerprint") != teacher.fingerprint():
        raise OtherSettingsError(f"{folder} was trained with another teacher; restore it, or use another `out`")


def describe_difference(before: Request, now: Request) -> str:
    """The first difference between two requests; empty if there is none."""
    old, new = flatten_request(before), flatten_request(now)
    for name in dict.fromkeys((*new, *old)):
        if old.get(name) != new.get(name):
            return f"{name} {format_value(old.get(name))}, now {format_value(new.get(name))}"
    return ""


def flatten_request(request: Request) -> dict[str, Any]:
    flat = json_round_trip(request.to_json())
    recipe = flat.pop("recipe")
    preprocessing = {f"preprocessing {name}": value for name, value in recipe.pop("preprocessing").items()}
    fields = recipe.pop("fields")
    for size in [name for name in ("image_size", "patch_size") if isinstance(fields.get(name), int)]:
        fields[size] = 2 * [fields[size]]  # as from the command line
    return {**flat, **fields, **preprocessing, **recipe}


class StudyResults(Protocol):
    """The results of a study: a table, everything behind it as JSON, and both with a figure in a folder."""

    @property
    def table(self) -> Table: ...

    def to_json(self) -> dict[str, Any]: ...

    def write(self, folder: Path) -> list[Path]: ...


@dataclass(frozen=True)
class FinishedStudy:
    """The results of a study, the files that they were written to, and the runs that diverged."""

    results: StudyResults
    written: list[Path]
    failed: Mapping[str, DivergedError]
    runs: int

    def raise_if_failed(self) -> None:
        for name, error in self.failed.items():
            message = f"{len(self.failed)} of {self.runs} runs failed: {name}: {error}"
            raise VitrailError(message, fields=error.fields)


class StudyStoppedError(VitrailError):
    """A run was stopped; the same command resumes the study."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(f"{message}; run the same command again to resume")
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class TrainingStudy:
    """Rows that are trained with each seed and compared in a table."""

    title: str
    rows: Sequence[AblationVariant]
    runs: Sequence[AblationRun]
    folder: Path
    read_results: Callable[
        [Sequence[AblationRun], Mapping[str, str]], StudyResults
    ]  # from the runs and why some failed

    def describe(self) -> list[str]:
        states, width = [run.state for run in self.runs], max(len(row.name) for row in self.rows)
        known = [("finished", "finished"), ("stopped", "to resume")]
        some = ", ".join(f"{count} {words}" for state, words in known if (count := states.count(state)))
        counts = f"{len(self.runs)} runs" + (f" ({some})" if some else "")
        rows = [f"  {row.name.ljust(width)}  {row.description}" for row in self.rows]
        return [f"{self.title}: {counts} in {self.folder}", *rows]

    def run(self, runtime: Runtime, *, dry_run: bool = False) -> FinishedStudy | None:
        """Train what is left to train and write the table; None in every process but the first.

        A dry run only reports the rows.
        """
        with join_process_group() as ranks:
            runtime = runtime.for_rank(ranks)
            if runtime.threads == "auto" and ranks.world_size == 1:  # the same for all runs, whatever else is running
                runtime = replace(runtime, threads=torch.get_num_threads())
            runtime.report_lines(*self.describe())
            failed = {} if dry_run else self.train(runtime)
        if not ranks.is_first:
            return None
        runs = () if dry_run else self.runs
        results = self.read_results(runs, {name: str(error) for name, error in failed.items()})
        return FinishedStudy(results, [] if dry_run else results.write(self.folder), failed, len(self.runs))

    def train(self, runtime: Runtime) -> dict[str, DivergedError]:
        """Finish every run; return those that diverged, since they are results as well."""
        failed = dict[str, DivergedError]()
        for number, run in enumerate(self.runs, 1):
            if run.state == "finished":
                continue
            name = run.folder.name
            runtime.report(f"\n── {number}/{len(self.runs)} {name}: {run.row.description}")
            try:
                if run.state == "stopped":
                    resume_run(run.folder, runtime, run.request.trusted_code)
                else:
                    start_run(run.request, run.folder, runtime, start=monotonic())
            except StoppedError as error:
                raise StudyStoppedError(f"{name} {error.reason}", error.exit_code) from None
            except KeyboardInterrupt:
                raise StudyStoppedError(f"{name} stopped by SIGINT", 128 + signal.SIGINT) from None
            except DivergedError as error:
                failed[name] = error
                runtime.report(f"failed {error}")
        return failed


SPREAD = "mean ± standard deviation over seeds"


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The last evaluation in the log of one run; `failed` says why there is none."""

    seed: int
    folder: Path
    task: RecordedTask = field(default_factory=RecordedTask)
    value: float | None = None  # of the metric that counts
    loss: float | None = None
    failed: str = ""

    @classmethod
    def read(cls, folder: Path, seed: int, failed: str = "") -> "RunOutcome":
        run = read_run_summary(folder)
        if failed:
            return cls(seed=seed, folder=folder, task=run.task, failed=failed)
        return cls(seed=seed, folder=folder, task=run.task, value=run.last_metric, loss=run.last_value("val_loss"))

    def to_json(self) -> dict[str, Any]:
        data = {"seed": self.seed, "run": self.folder.name, self.task.metric.name: self.value, "loss": self.loss}
        return data | ({"failed": self.failed} if self.failed else {})


@dataclass(frozen=True, kw_only=True)
class AblationVariantOutcomes:
    row: AblationVariant
    outcomes: tuple[RunOutcome, ...]

    @property
    def values(self) -> list[float]:
        """The metric that counts, of each run that has a result."""
        return [each.value for each in self.outcomes if each.value is not None]

    @property
    def losses(self) -> list[float]:
        return [each.loss for each in self.outcomes if each.loss is not None]

    @property
    def mean(self) -> float | None:
        return compute_mean(self.values)

    @property
    def std(self) -> float | None:
        return compute_std(self.values)


@dataclass(frozen=True, kw_only=True)
class AblationResults:
    recipe: str
    data: str
    lines: tuple[AblationVariantOutcomes, ...]  # the full row is the first

    def __post_init__(self) -> None:
        """Refuse runs that cannot be compared."""
        by_metric = {each.task.metric: each.folder.name for each in self.evaluated_outcomes}
        if len(by_metric) > 1:
            (metric, run), (other, other_run) = list(by_metric.items())[:2]
            raise ConfigError(
                f"{run} was evaluated by {metric.label} and {other_run} by {other.label}; expected runs of one task"
            )

    @classmethod
    def read(
        cls,
        recipe: str,
        data: str,
        rows: Sequence[AblationVariant],
        runs: Sequence[AblationRun],
        failed: Mapping[str, str],
    ) -> "AblationResults":
        """Read the logs of the runs; `failed` maps folder names of unfinished runs to the reason."""
        lines = [
            AblationVariantOutcomes(
                row=row,
                outcomes=tuple(
                    RunOutcome.read(run.folder, run.seed, failed.get(run.folder.name, ""))
                    for run in runs
                    if run.row is row
                ),
            )
            for row in rows
        ]
        return cls(recipe=recipe, data=data, lines=tuple(lines))

    @property
    def evaluated_outcomes(self) -> list[RunOutcome]:
        return [each for line in self.lines for each in line.outcomes if each.value is not None]

    @property
    def task(self) -> RecordedTask:
        """The task of all runs that have a result."""
        return next((each.task for each in self.evaluated_outcomes), RecordedTask())

    @property
    def metric(self) -> Metric:
        return self.task.metric

    @property
    def scale(self) -> int:
        """Shares are in per cent."""
        return 100 if self.metric.is_share else 1

    @property
    def digits(self) -> int:
        return 2 if self.metric.is_share else 4

    @property
    def shows_loss(self) -> bool:
        return self.metric.name != "loss"

    def gain(self, line: AblationVariantOutcomes) -> float | None:
        """The metric relative to the full row, in percentage points for a share; positive is better."""
        own, full = line.mean, self.lines[0].mean
        sign = 1 if self.metric.higher_is_better else -1
        return None if own is None or full is None else sign * self.scale * (own - full)

    def make_result_columns(self, gain: str) -> tuple[Column, Column]:
        """The metric that counts, and how much better it is than in the first row."""
        share = self.metric.is_share
        return (
            Column(name=self.metric.label, unit="%" if share else "", digits=self.digits),
            Column(name=gain, unit="points" if share else "", digits=self.digits, signed=True),
        )

    def make_result_cells(self, line: AblationVariantOutcomes) -> tuple[Cell, Cell]:
        found = make_mean_cell(line.values) or Shown(None, format_failure(line))
        return found, None if line is self.lines[0] else self.gain(line)

    @property
    def table(self) -> Table:
        loss = " and loss" if self.shows_loss else ""
        return Table(
            title=f"{self.recipe} on {self.data}: validation {self.metric.label}{loss}, {SPREAD}",
            columns=(
                Column(name="row"),
                Column(name="what differs"),
                *self.make_result_columns("to full" if self.metric.higher_is_better else "gain"),
                *[Column(name="loss", digits=4)] * self.shows_loss,
                Column(name="seeds"),
            ),
            rows=[
                (
                    line.row.name,
                    line.row.description,
                    *self.make_result_cells(line),
                    *([make_mean_cell(line.losses)] if self.shows_loss else []),
                    make_seed_cell(line),
                )
                for line in self.lines
            ],
        )

    def __str__(self) -> str:
        return self.table.format_rows()

    def to_json(self) -> dict[str, Any]:
        """Studies of tasks other than classification also have `task` and `metric`."""
        metric, task = self.metric, self.task
        rows = [
            {
                "row": line.row.name,
                "changes": {name: {"full": before, "here": now} for name, (before, now) in line.row.changes.items()},
                metric.name: line.mean,
                f"{metric.name}_std": line.std,
                "points" if metric.is_share else "gain": self.gain(line),
                **(
                    {"loss": compute_mean(line.losses), "loss_std": compute_std(line.losses)} if self.shows_loss else {}
                ),
                "runs": [each.to_json() for each in line.outcomes],
            }
            for line in self.lines
        ]
        about = {} if task.is_classification else {"task": task.name, "metric": asdict(metric)}
        return {"recipe": self.recipe, "data": self.data, **about, "rows": rows}

    def write(self, folder: Path) -> list[Path]:
        """Write table.json, table.md and, if there are results, ablation.png."""
        return write_table_and_plot(self, draw_ablation(self), folder, "ablation.png")


def write_table_and_plot(results: StudyResults, figure: "Figure | None", folder: Path, name: str) -> list[Path]:
    write_json(folder / "table.json", results.to_json())
    results.table.write(folder / "table.md")
    if figure is not None:
        save_figure(figure, folder / name)
    return [folder / each for each in ("table.json", "table.md", *[name] * (figure is not None))]


def compute_mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def compute_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n − 1); None for a single seed."""
    return stdev(values) if len(values) > 1 else None


def make_mean_cell(values: Sequence[float]) -> Mean | None:
    mean = compute_mean(values)
    return None if mean is None else Mean(mean, compute_std(values))


def format_failure(line: AblationVariantOutcomes) -> str:
    return "failed" if any(each.failed for each in line.outcomes) else ""


def make_seed_cell(line: AblationVariantOutcomes) -> Cell:
    """Number of finished runs, and of all if some did not finish."""
    finished, total = len(line.values), len(line.outcomes)
    return total if finished == total else Shown(finished, f"{finished} of {total}")


def draw_ablation(results: AblationResults) -> "Figure | None":
    """Draw the gain or loss of each row relative to the full one; None if there is nothing to draw."""
    full, rest = results.lines[0], results.lines[1:]
    metric, mean = results.metric, full.mean
    if mean is None or not rest:
        return None
    names = [wrap_label(line.row.name, 28) for line in rest]
    figure = new_figure(FIGURE_WIDTH, 1.4 + 0.34 * sum(1 + 0.3 * name.count("\n") for name in names))
    axes = figure.subplots()
    setting = f"{sanitize_label(results.recipe)} on {sanitize_label(Path(results.data).name)}"
    style_axes(axes, "")
    axes.set_title(f"{setting}: full {metric.format_value(mean)}", fontsize=TITLE_POINTS, loc="left", parse_math=False)
    ends = [0.0]
    for place, line in enumerate(rest):
        gain, std = results.gain(line) or 0.0, results.scale * (line.std or 0.0)
        color, side = (RED, -1) if gain < 0 else (BLUE, 1)
        axes.barh(place, gain, color=color, alpha=0.85, xerr=std or None, ecolor=GRAY)
        ends.append(gain + side * std)
        label = f"{gain:+.{results.digits}f}".replace("-", "−") if line.values else format_failure(line)
        style: dict[str, Any] = {"va": "center", "ha": "left" if side > 0 else "right", "fontsize": LABEL_POINTS}
        axes.annotate(label, (ends[-1], place), (4 * side, 0), textcoords="offset points", **style)
    axes.axvline(0, color=GRAY, linewidth=1)
    room = 0.2 * (max(ends) - min(ends) or 1.0)  # of the values next to the bars
    axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.set_yticks(range(len(rest)), names, fontsize=LABEL_POINTS, parse_math=False)
    axes.invert_yaxis()
    label = f"validation {sanitize_label(metric.label)} relative to the full recipe"
    is_repeated = any(line.std is not None for line in rest)
    notes = [
        *["percentage points"] * metric.is_share,
        *["positive is better"] * (not metric.higher_is_better),
        *["whiskers: standard deviation over seeds"] * is_repeated,
    ]
    axes.set_xlabel(f"{label}\n({'; '.join(notes)})" if notes else label, parse_math=False)
    return figure
