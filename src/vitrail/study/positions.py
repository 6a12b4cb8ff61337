"""Which positions, and where they are added: the eight cells of the ViT appendix, trained on any data.

Dosovitskiy 2020 (arXiv 2010.11929), appendix D.4, table 8. The rows are those of an ablation; the first has no
positions, and the others are compared with it. Relative positions differ: the paper counts offsets along the sequence,
here they are (rows, columns).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError
from vitrail.models.catalog import find
from vitrail.study.ablate import Ablation, Row
from vitrail.study.ablation import Line, Table, failure, markdown_table, seeds, spread, write_texts
from vitrail.tables import text_table
from vitrail.train.job import Request

PAPER = "ViT-B/16, ImageNet, 5-shot linear"  # what the paper's column measures
HEADING = ("positions", "added", "top-1", "to none", "seeds", "paper", "to none")
SIDES = "llrrrrr"
FIELDS = ("positions", "positions_at")


@dataclass(frozen=True)
class Cell:
    """One cell of the paper's table."""

    name: str  # of its row, and so of its runs
    kind: str
    where: str
    positions: str
    positions_at: str
    paper: float  # accuracy

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def paper_points(self) -> float:
        """Percentage points above no positions, in the paper."""
        return 100 * (self.paper - NONE.paper)

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


NONE = Cell("none", "none", "", "none", "stem", 0.61382)
CELLS = (
    NONE,
    Cell("1d-stem", "1-D", "at the stem", "learned", "stem", 0.64206),
    Cell("1d-layers", "1-D", "every layer", "learned", "layers", 0.63964),
    Cell("1d-shared", "1-D", "every layer, shared", "learned", "shared", 0.64292),
    Cell("2d-stem", "2-D", "at the stem", "learned_2d", "stem", 0.64001),
    Cell("2d-layers", "2-D", "every layer", "learned_2d", "layers", 0.64046),
    Cell("2d-shared", "2-D", "every layer, shared", "learned_2d", "shared", 0.64022),
    Cell("relative", "relative", "", "relative", "stem", 0.64032),
)


def position_rows(asked: Request) -> tuple[Ablation, list[Row]]:
    """A row for each cell, that without positions first; all are checked before any is trained."""
    name = asked.recipe.model
    if name is not None and not hasattr(find(name, trusted=asked.trusted)[1], "positions_at"):
        raise ConfigError(f"{name} has no choice of positions; expected a ViT, such as --model ViT-Ti/16")
    ablation = Ablation(replace(asked, recipe=asked.recipe.changed({"fields": NONE.fields})))
    others = [replace(ablation.replaced(cell.fields), name=cell.name) for cell in CELLS[1:]]
    return ablation, [replace(ablation.full, name=NONE.name, alike="no positions"), *others]


@dataclass(frozen=True)
class PositionTable:
    """What came out, beside the paper's numbers."""

    table: Table  # its lines are those of CELLS

    @property
    def pairs(self) -> list[tuple[Cell, Line]]:
        return list(zip(CELLS, self.table.lines, strict=True))

    def gains(self) -> dict[Cell, float]:
        """Points above no positions, of each cell that came to an end."""
        return {cell: points for cell, line in self.pairs[1:] if (points := self.table.points(line)) is not None}

    def deviation(self) -> float | None:
        """Of one training, in points: the standard deviation over seeds, pooled over the cells."""
        found = [(len(line.all_of("top1")) - 1, line.std("top1")) for line in self.table.lines]
        freedom = sum(extra for extra, std in found if std is not None)
        if not freedom:
            return None
        return 100 * sqrt(sum(extra * std**2 for extra, std in found if std is not None) / freedom)

    def chance(self) -> float | None:
        """The standard deviation of a difference between two cells' means, by chance alone, in points."""
        one, ended = self.deviation(), [len(values) for line in self.table.lines if (values := line.all_of("top1"))]
        return None if one is None else one * sqrt(2 / min(ended))

    def findings(self) -> list[str]:
        """The paper's answer, and the one that came out here."""
        gains, chance = self.gains(), self.chance()
        lines = [f"the paper ({PAPER}): {told({cell: cell.paper_points for cell in CELLS[1:]})}"]
        if not gains:
            return lines
        lines.append(f"here (top-1 of validation): {told(gains)}")
        if chance is None:
            lines.append("how much of a difference is chance is not known from one seed; more of them would tell")
        else:
            lines.append(f"a difference between two means varies by ± {chance:.2f} points by chance alone")
        return lines

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (
                cell.kind,
                cell.where,
                spread(line.mean("top1"), line.std("top1"), 100, 2) or failure(line),
                "" if cell is NONE or (points := self.table.points(line)) is None else f"{points:+.2f}",
                seeds(line),
                f"{100 * cell.paper:.2f}",
                "" if cell is NONE else f"{cell.paper_points:+.2f}",
            )
            for cell, line in self.pairs
        ]

    def __str__(self) -> str:
        return "\n".join([*text_table(HEADING, self.cells(), SIDES), "", *self.findings()])

    def to_json(self) -> dict[str, Any]:
        whole = self.table.to_json()
        its = [{**cell.fields, "paper": cell.paper, "paper_points": cell.paper_points} for cell in CELLS]
        rows = [{**row, **more} for row, more in zip(whole["rows"], its, strict=True)]
        return {**whole, "rows": rows, "paper": PAPER, "chance": self.chance(), "findings": self.findings()}

    def markdown(self) -> str:
        about = f"top-1 (in %) of validation, mean ± standard deviation over seeds, beside the paper's ({PAPER})"
        found = "\n".join(f"- {line}" for line in self.findings())
        table = markdown_table(HEADING, self.cells(), SIDES)
        return f"{self.table.recipe} on {self.table.data}: {about}\n\n{table}\n\n{found}\n"

    def write(self, folder: Path) -> list[Path]:
        return write_texts(folder, self.to_json(), self.markdown())


def told(gains: Mapping[Cell, float]) -> str:
    """How many kinds of positions help, how much, and how much it matters which."""
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    above = sum(points > 0 for points in gains.values())
    return (
        f"{above} of {len(gains)} are above none; the worst by {gains[worst]:+.2f} points ({worst}), the best by "
        f"{gains[best]:+.2f} ({best}), {gains[best] - gains[worst]:.2f} apart"
    )
