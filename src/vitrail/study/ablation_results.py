"""Results of an ablation: each row averaged over seeds and compared with the full row, as a table and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError
from vitrail.base.figures import new_figure, sanitize_label, save_figure, style_axes, wrap_label
from vitrail.base.files import write_json
from vitrail.base.style import BLUE, FIGURE_WIDTH, GREY, LABEL_POINTS, RED, TITLE_POINTS
from vitrail.base.table import Cell, Column, Mean, Shown, Table
from vitrail.study.ablation_runs import AblationRun, AblationVariant, StudyResults
from vitrail.tasks.metric import Metric
from vitrail.train.run_list import RecordedTask, read_run_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        colour, side = (RED, -1) if gain < 0 else (BLUE, 1)
        axes.barh(place, gain, color=colour, alpha=0.85, xerr=std or None, ecolor=GREY)
        ends.append(gain + side * std)
        label = f"{gain:+.{results.digits}f}".replace("-", "−") if line.values else format_failure(line)
        style: dict[str, Any] = {"va": "center", "ha": "left" if side > 0 else "right", "fontsize": LABEL_POINTS}
        axes.annotate(label, (ends[-1], place), (4 * side, 0), textcoords="offset points", **style)
    axes.axvline(0, color=GREY, linewidth=1)
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
