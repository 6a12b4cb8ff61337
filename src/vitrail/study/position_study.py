"""The position study of the ViT paper: kinds of position embeddings and where they are added, trained on any data.

Dosovitskiy 2020 (arXiv 2010.11929), appendix D.4, table 8. The rows are those of an ablation; the first has no
positions and the others are compared with it. Relative positions differ from the paper: it uses offsets along the
sequence, here they are (rows, columns).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError
from vitrail.base.figures import new_figure, sanitize_label, style_axes
from vitrail.base.style import BLUE, GRAY, LABEL_POINTS, NOTE_POINTS
from vitrail.base.table import Column, Table
from vitrail.distributed import Ranks, resolve_device
from vitrail.models.catalog.families import find_preset
from vitrail.recipes.request import Request
from vitrail.study.ablation import AblationPlanner
from vitrail.study.training_study import (
    SPREAD,
    AblationResults,
    AblationRun,
    AblationVariant,
    AblationVariantOutcomes,
    TrainingStudy,
    find_study_folder,
    format_failure,
    list_ablation_runs,
    make_seed_cell,
    write_table_and_plot,
)
from vitrail.tasks.metric import CLASSIFICATION_METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_SETTING = "ViT-B/16, ImageNet, 5-shot linear"


@dataclass(frozen=True)
class PaperPositionCell:
    """One cell of the paper's table."""

    name: str  # of its row and runs
    kind: str
    where: str
    positions: str
    positions_at: str
    paper: float  # accuracy

    @property
    def fields(self) -> dict[str, Any]:
        return {"positions": self.positions, "positions_at": self.positions_at}

    @property
    def paper_points(self) -> float:
        """Percentage points above no positions in the paper."""
        return 100 * (self.paper - NO_POSITIONS.paper)

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


NO_POSITIONS = PaperPositionCell("none", "none", "", "none", "stem", 0.61382)
POSITION_CELLS = (
    NO_POSITIONS,
    PaperPositionCell("1d-stem", "1-D", "at the stem", "learned", "stem", 0.64206),
    PaperPositionCell("1d-layers", "1-D", "every layer", "learned", "layers", 0.63964),
    PaperPositionCell("1d-shared", "1-D", "every layer, shared", "learned", "shared", 0.64292),
    PaperPositionCell("2d-stem", "2-D", "at the stem", "learned_2d", "stem", 0.64001),
    PaperPositionCell("2d-layers", "2-D", "every layer", "learned_2d", "layers", 0.64046),
    PaperPositionCell("2d-shared", "2-D", "every layer, shared", "learned_2d", "shared", 0.64022),
    PaperPositionCell("relative", "relative", "", "relative", "stem", 0.64032),
)


def plan_position_ablation(request: Request) -> tuple[AblationPlanner, list[AblationVariant]]:
    """Rows for all cells, the one without positions first; all are checked before any is trained."""
    name = request.recipe.model
    if name is not None and "positions_at" not in vars(find_preset(name, trusted=request.trusted)[1]):
        raise ConfigError(f"`model` is {name}, which has no choice of positions; use a ViT, such as ViT-Ti/16")
    ablation = AblationPlanner(replace(request, recipe=request.recipe.with_settings({"fields": NO_POSITIONS.fields})))
    if ablation.plan.task.metrics != CLASSIFICATION_METRICS:
        raise ConfigError(f"the task of {request.recipe.name} is {request.task_name}; expected classification")
    others = [replace(ablation.row_with(cell.fields), name=cell.name) for cell in POSITION_CELLS[1:]]
    return ablation, [replace(ablation.full_row, name=NO_POSITIONS.name, unchanged_text="no positions"), *others]


@dataclass(frozen=True)
class PositionStudyResults:
    """Results of the position study, compared with the paper's."""

    ablation: AblationResults  # one line per cell

    @property
    def pairs(self) -> list[tuple[PaperPositionCell, AblationVariantOutcomes]]:
        return list(zip(POSITION_CELLS, self.ablation.lines, strict=True))

    def compute_gains(self) -> dict[PaperPositionCell, float]:
        """Points above no positions, for each cell with a result."""
        return {cell: points for cell, line in self.pairs[1:] if (points := self.ablation.gain(line)) is not None}

    def pooled_deviation(self) -> float | None:
        """Standard deviation over seeds of one run, pooled over all cells, in points."""
        deviations = [(len(line.values) - 1, line.std) for line in self.ablation.lines]
        degrees_of_freedom = sum(extra for extra, std in deviations if std is not None)
        if not degrees_of_freedom:
            return None
        return 100 * sqrt(sum(extra * std**2 for extra, std in deviations if std is not None) / degrees_of_freedom)

    def chance_deviation(self) -> float | None:
        """Standard deviation, by chance alone, of the difference between the means of two cells, in points."""
        deviation = self.pooled_deviation()
        seeds = [len(line.values) for line in self.ablation.lines if line.values]
        return None if deviation is None else deviation * sqrt(2 / min(seeds))

    def describe_findings(self) -> list[str]:
        """The findings of the paper and of these runs."""
        gains, chance = self.compute_gains(), self.chance_deviation()
        lines = [f"paper ({PAPER_SETTING}): {describe_gains({cell: cell.paper_points for cell in POSITION_CELLS[1:]})}"]
        if not gains:
            return lines
        lines.append(f"here (validation top-1): {describe_gains(gains)}")
        if chance is None:
            lines.append("one seed does not show how large differences by chance are; train with more seeds")
        else:
            lines.append(f"by chance alone, the difference between two means varies by ± {chance:.2f} points")
        return lines

    @property
    def table(self) -> Table:
        return Table(
            title=f"{self.ablation.recipe} on {self.ablation.data}: validation top-1, {SPREAD}, "
            f"and the paper's ({PAPER_SETTING})",
            columns=(
                Column(name="positions"),
                Column(name="added"),
                *self.ablation.make_result_columns("to none"),
                Column(name="seeds"),
                Column(name="paper", unit="%", digits=2),
                Column(name="paper to none", unit="points", digits=2, signed=True),
            ),
            rows=[
                (
                    cell.kind,
                    cell.where,
                    *self.ablation.make_result_cells(line),
                    make_seed_cell(line),
                    cell.paper,
                    None if cell is NO_POSITIONS else cell.paper_points,
                )
                for cell, line in self.pairs
            ],
            notes=tuple(self.describe_findings()),
        )

    def __str__(self) -> str:
        return str(replace(self.table, title=""))

    def to_json(self) -> dict[str, Any]:
        data = self.ablation.to_json()
        paper = [{**cell.fields, "paper": cell.paper, "paper_points": cell.paper_points} for cell in POSITION_CELLS]
        rows = [{**row, **more} for row, more in zip(data["rows"], paper, strict=True)]
        return {
            **data,
            "rows": rows,
            "paper": PAPER_SETTING,
            "chance": self.chance_deviation(),
            "findings": self.describe_findings(),
        }

    def write(self, folder: Path) -> list[Path]:
        """Write table.json, table.md and, if there are results, positions.png."""
        return write_table_and_plot(self, draw_position_study(self), folder, "positions.png")


def plan_position_study(
    request: Request, *, seeds: Sequence[int] = (0,), folder: Path | None = None, device: str = "auto"
) -> TrainingStudy:
    """The rows of the study and their runs in the folder, by default one in runs/; one seed after the other."""
    resolve_device(device, Ranks())  # at once, not when the first is trained
    recipe, (ablation, rows) = request.recipe, plan_position_ablation(request)
    data = ablation.data.name
    folder = folder or find_study_folder(f"{Path(data).name or 'data'}-positions", rows, seeds)

    def read_results(runs: Sequence[AblationRun], failed: Mapping[str, str]) -> PositionStudyResults:
        return PositionStudyResults(AblationResults.read(recipe.name, data, rows, runs, failed))

    return TrainingStudy(
        title=f"positions of {recipe.model} by recipe {recipe.name} on {data}",
        rows=rows,
        runs=sorted(list_ablation_runs(rows, seeds, folder), key=lambda run: run.seed),
        folder=folder,
        read_results=read_results,
    )


def describe_gains(gains: Mapping[PaperPositionCell, float]) -> str:
    """Sentence on how many kinds of positions help, and how much they differ."""
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    above = sum(points > 0 for points in gains.values())
    return (
        f"{above} of {len(gains)} are above none, from {gains[worst]:+.2f} points ({worst}) to {gains[best]:+.2f} "
        f"({best}), a range of {gains[best] - gains[worst]:.2f}"
    )


def draw_position_study(results: PositionStudyResults) -> "Figure | None":
    """Draw the accuracy of each cell, with a dot per seed, next to the paper's; None if `none` has no result."""
    none = results.ablation.lines[0].mean
    if none is None:
        return None
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    ablation = results.ablation
    setting = f"{sanitize_label(ablation.recipe)} on {sanitize_label(Path(ablation.data).name)}"
    is_repeated = any(len(line.values) > 1 for _, line in results.pairs)
    style_axes(left, f"{setting}\nvalidation top-1 (%)")
    left.set_xlabel("numbers: points above none" + "; ◆ mean, dots: seeds" * is_repeated, fontsize=NOTE_POINTS)
    for place, (cell, line) in enumerate(results.pairs):
        shares, mean = [100 * share for share in line.values], line.mean
        if mean is None:
            plot_lollipop(left, place, 100 * none, 100 * none, GRAY, format_failure(line), marker="")
        else:
            label = f"{mean:.2%}" if place == 0 else f"{ablation.gain(line):+.2f}"
            plot_lollipop(left, place, 100 * none, 100 * mean, BLUE, label, others=shares)
        label = f"{cell.paper:.2%}" if place == 0 else f"{cell.paper_points:+.2f}"
        plot_lollipop(right, place, 0, cell.paper_points, GRAY, label)
    left.set_yticks(range(len(POSITION_CELLS)), [str(cell) for cell in POSITION_CELLS], fontsize=LABEL_POINTS)
    left.invert_yaxis()
    style_axes(right, f"paper: points above none\n({PAPER_SETTING})")
    for axes, start in ((left, 100 * none), (right, 0)):
        axes.axvline(start, color=GRAY, linewidth=1, linestyle="--")
        axes.margins(x=0.15)
    return figure


def plot_lollipop(
    axes: Any,
    place: int,
    start: float,
    end: float,
    color: str,
    label: str,
    *,
    marker: str = "D",
    others: Sequence[float] = (),
) -> None:
    """Draw a value with a line from `start`, dots for `others` if there are several, and its label to the right."""
    axes.plot([start, end], [place, place], color=color, linewidth=2, alpha=0.4)
    if len(others) > 1:
        axes.plot(others, [place] * len(others), ".", color=GRAY, markersize=6)
    axes.plot(end, place, color=color, marker=marker, markersize=7)
    after = max((start, end, *others))
    axes.annotate(label, (after, place), (7, 0), textcoords="offset points", va="center", fontsize=LABEL_POINTS)
