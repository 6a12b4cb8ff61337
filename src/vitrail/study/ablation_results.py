"""Results of an ablation: each row averaged over seeds and compared with the full row, as text and files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.base.text import format_table
from vitrail.study.ablation_plan import AblationVariant
from vitrail.study.ablation_runs import AblationRun
from vitrail.study.result_files import format_json, write_texts_to_folder
from vitrail.tasks.metric import Metric
from vitrail.train.run_list import RecordedTask, read_run_summary


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

    def format_gain(self, line: AblationVariantOutcomes) -> str:
        """Empty for the full row."""
        gain = self.gain(line)
        return "" if line is self.lines[0] or gain is None else f"{gain:+.{self.digits}f}"

    @property
    def heading(self) -> tuple[str, ...]:
        gain = "to full" if self.metric.higher_is_better else "gain"
        return "row", "what differs", self.metric.label, gain, *["loss"] * self.shows_loss, "seeds"

    @property
    def alignments(self) -> str:
        return "llrr" + "r" * self.shows_loss + "r"

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (
                line.row.name,
                line.row.description,
                format_mean_and_std(line.values, self.scale, self.digits) or format_failure(line),
                self.format_gain(line),
                *([format_mean_and_std(line.losses, 1, 4)] if self.shows_loss else []),
                format_seed_count(line),
            )
            for line in self.lines
        ]

    def __str__(self) -> str:
        return "\n".join(format_table(self.heading, self.cells(), self.alignments))

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

    def to_markdown(self) -> str:
        unit, loss = " (in %)" if self.metric.is_share else "", " and loss" if self.shows_loss else ""
        about = f"validation {self.metric.label}{unit}{loss}, mean ± standard deviation over seeds"
        table = markdown_table(self.heading, self.cells(), self.alignments)
        return f"{self.recipe} on {self.data}: {about}\n\n{table}\n"

    def write(self, folder: Path) -> list[Path]:
        """Write table.json, table.md and, if there are results, ablation.png."""
        from vitrail.study.plots import draw_ablation

        return write_table_and_plot(self, draw_ablation, folder, "ablation.png")


def markdown_table(heading: Sequence[str], lines: Sequence[Sequence[str]], alignments: str) -> str:
    """Like `format_table`, in Markdown."""
    rule = ["---:" if each == "r" else "---" for each in alignments]
    rows = (heading, rule, *lines)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def write_table_and_plot(table: Any, draw: Callable[[Any], Any], folder: Path, name: str) -> list[Path]:
    texts = {"table.json": format_json(table.to_json()), "table.md": table.to_markdown()}
    written = write_texts_to_folder(folder, texts)
    figure = draw(table)
    if figure is None:
        return written

    from vitrail.base.figures import save_figure

    save_figure(figure, folder / name)
    return [*written, folder / name]


def compute_mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def compute_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n − 1); None for a single seed."""
    return stdev(values) if len(values) > 1 else None


def format_mean_and_std(values: Sequence[float], scale: float, digits: int) -> str:
    mean, std = compute_mean(values), compute_std(values)
    if mean is None:
        return ""
    return f"{mean * scale:.{digits}f}" + ("" if std is None else f" ± {std * scale:.{digits}f}")


def format_failure(line: AblationVariantOutcomes) -> str:
    return "failed" if any(each.failed for each in line.outcomes) else ""


def format_seed_count(line: AblationVariantOutcomes) -> str:
    """Number of finished runs, and of all if some did not finish."""
    finished, total = len(line.values), len(line.outcomes)
    return str(total) if finished == total else f"{finished} of {total}"
