"""Which positions a ViT needs, and where they are added: the eight cells of the ViT appendix, trained on any data.

Dosovitskiy 2020 (arXiv 2010.11929), appendix D.4, table 8. The rows are those of an ablation; the first has no
positions, and the others are compared with it. Relative positions differ: the paper counts offsets along the sequence,
here they are (rows, columns).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError
from vitrail.models.catalog import find_preset
from vitrail.study.ablation_plan import Ablation, AblationRow
from vitrail.study.ablation_results import (
    AblationLine,
    AblationTable,
    format_failure,
    format_mean_and_std,
    format_seed_count,
    markdown_table,
    write_table_files,
)
from vitrail.text import format_table
from vitrail.train.request import Request

PAPER_SETTING = "ViT-B/16, ImageNet, 5-shot linear"  # what the paper's column measures
HEADING = ("positions", "added", "top-1", "to none", "seeds", "paper", "to none")
SIDES = "llrrrrr"
POSITION_FIELDS = ("positions", "positions_at")


@dataclass(frozen=True)
class PositionCell:
    """One cell of the paper's table."""

    name: str  # of its row, and so of its runs
    kind: str
    where: str
    positions: str
    positions_at: str
    paper: float  # accuracy

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in POSITION_FIELDS}

    @property
    def paper_points(self) -> float:
        """Percentage points above no positions, in the paper."""
        return 100 * (self.paper - NO_POSITIONS.paper)

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


NO_POSITIONS = PositionCell("none", "none", "", "none", "stem", 0.61382)
POSITION_CELLS = (
    NO_POSITIONS,
    PositionCell("1d-stem", "1-D", "at the stem", "learned", "stem", 0.64206),
    PositionCell("1d-layers", "1-D", "every layer", "learned", "layers", 0.63964),
    PositionCell("1d-shared", "1-D", "every layer, shared", "learned", "shared", 0.64292),
    PositionCell("2d-stem", "2-D", "at the stem", "learned_2d", "stem", 0.64001),
    PositionCell("2d-layers", "2-D", "every layer", "learned_2d", "layers", 0.64046),
    PositionCell("2d-shared", "2-D", "every layer, shared", "learned_2d", "shared", 0.64022),
    PositionCell("relative", "relative", "", "relative", "stem", 0.64032),
)


def build_position_rows(request: Request) -> tuple[Ablation, list[AblationRow]]:
    """A row for each cell, the one without positions first; all are checked before any is trained."""
    name = request.recipe.model
    if name is not None and not hasattr(find_preset(name, trusted=request.trusted)[1], "positions_at"):
        raise ConfigError(
            f"{name} has no choice of positions; expected a ViT, such as `model` ViT-Ti/16", fields=("model",)
        )
    ablation = Ablation(replace(request, recipe=request.recipe.with_settings({"fields": NO_POSITIONS.fields})))
    others = [replace(ablation.row_with(cell.fields), name=cell.name) for cell in POSITION_CELLS[1:]]
    return ablation, [replace(ablation.full_row, name=NO_POSITIONS.name, unchanged_text="no positions"), *others]


@dataclass(frozen=True)
class PositionStudyTable:
    """The results compared with the paper's numbers."""

    table: AblationTable  # its lines are those of POSITION_CELLS

    @property
    def pairs(self) -> list[tuple[PositionCell, AblationLine]]:
        return list(zip(POSITION_CELLS, self.table.lines, strict=True))

    def compute_gains(self) -> dict[PositionCell, float]:
        """Points above no positions, for each cell with a result."""
        return {
            cell: points for cell, line in self.pairs[1:] if (points := self.table.gain_in_points(line)) is not None
        }

    def pooled_deviation(self) -> float | None:
        """The standard deviation of one run over seeds, pooled over the cells, in points."""
        found = [(len(line.list_values("top1")) - 1, line.std("top1")) for line in self.table.lines]
        freedom = sum(extra for extra, std in found if std is not None)
        if not freedom:
            return None
        return 100 * sqrt(sum(extra * std**2 for extra, std in found if std is not None) / freedom)

    def chance_deviation(self) -> float | None:
        """The standard deviation of a difference between two cells' means, by chance alone, in points."""
        one, ended = (
            self.pooled_deviation(),
            [len(values) for line in self.table.lines if (values := line.list_values("top1"))],
        )
        return None if one is None else one * sqrt(2 / min(ended))

    def describe_findings(self) -> list[str]:
        """The paper's finding, and the one of these runs."""
        gains, chance = self.compute_gains(), self.chance_deviation()
        lines = [
            f"the paper ({PAPER_SETTING}): {describe_gains({cell: cell.paper_points for cell in POSITION_CELLS[1:]})}"
        ]
        if not gains:
            return lines
        lines.append(f"here (top-1 of validation): {describe_gains(gains)}")
        if chance is None:
            lines.append("one seed does not show how much of a difference is chance; train more seeds")
        else:
            lines.append(f"a difference between two means varies by ± {chance:.2f} points by chance alone")
        return lines

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (
                cell.kind,
                cell.where,
                format_mean_and_std(line.mean("top1"), line.std("top1"), 100, 2) or format_failure(line),
                "" if cell is NO_POSITIONS or (points := self.table.gain_in_points(line)) is None else f"{points:+.2f}",
                format_seed_count(line),
                f"{100 * cell.paper:.2f}",
                "" if cell is NO_POSITIONS else f"{cell.paper_points:+.2f}",
            )
            for cell, line in self.pairs
        ]

    def __str__(self) -> str:
        return "\n".join([*format_table(HEADING, self.cells(), SIDES), "", *self.describe_findings()])

    def to_json(self) -> dict[str, Any]:
        table = self.table.to_json()
        its = [{**cell.fields, "paper": cell.paper, "paper_points": cell.paper_points} for cell in POSITION_CELLS]
        rows = [{**row, **more} for row, more in zip(table["rows"], its, strict=True)]
        return {
            **table,
            "rows": rows,
            "paper": PAPER_SETTING,
            "chance": self.chance_deviation(),
            "findings": self.describe_findings(),
        }

    def to_markdown(self) -> str:
        about = (
            f"top-1 (in %) of validation, mean ± standard deviation over seeds, next to the paper's ({PAPER_SETTING})"
        )
        found = "\n".join(f"- {line}" for line in self.describe_findings())
        table = markdown_table(HEADING, self.cells(), SIDES)
        return f"{self.table.recipe} on {self.table.data}: {about}\n\n{table}\n\n{found}\n"

    def write(self, folder: Path) -> list[Path]:
        """Write table.json, table.md and, with matplotlib, positions.png."""
        written = write_table_files(folder, self.to_json(), self.to_markdown())
        if find_spec("matplotlib"):
            from vitrail.study.plots import save_position_study_plot

            if save_position_study_plot(self, folder / "positions.png"):
                written.append(folder / "positions.png")
        return written


def describe_gains(gains: Mapping[PositionCell, float]) -> str:
    """How many kinds of positions help, how much, and how much it matters which."""
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    above = sum(points > 0 for points in gains.values())
    return (
        f"{above} of {len(gains)} are above none; the worst by {gains[worst]:+.2f} points ({worst}), the best by "
        f"{gains[best]:+.2f} ({best}), {gains[best] - gains[worst]:.2f} apart"
    )
