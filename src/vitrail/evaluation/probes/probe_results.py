"""Results of probes: as numbers, text, JSON and a figure. Accuracies are from 0 to 1."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label, style_axes
from vitrail.base.files import write_text
from vitrail.base.style import GRAY, LABEL_POINTS, NOTE_POINTS, PALE, PALETTE
from vitrail.base.table import Cell, Column, Mean, Shown, Table
from vitrail.base.text import format_count, make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBE_FILES = ("probe.json", "probe.png")
BASELINE_HATCHES = ("", "///", "...")
MAX_NAME_LENGTH = 40
MAX_LISTED_ROWS = 10  # unreadable images in the text


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """The probes of the features of a model, of raw pixels or of an untrained model."""

    name: str
    kind: str  # model, pixels or untrained
    width: int  # of the features
    knn: Mapping[int, float]  # accuracy by k
    few_shot: Mapping[int, tuple[float, ...]]  # accuracy of each seed, by shots
    linear: float | None = None
    weight_decay: float | None = None  # of the linear probe
    spread: float
    effective_rank: float
    baselines: tuple[int, ...] = ()  # of a model: the indices of its baselines in the table

    @property
    def best_k(self) -> int | None:
        """The k of the highest accuracy; of equal ones the smallest."""
        return max(sorted(self.knn), key=lambda count: self.knn[count]) if self.knn else None

    @property
    def accuracies(self) -> dict[str, float]:
        """One number per probe; few-shot is the mean over the seeds."""
        found = {f"k-NN {count}": accuracy for count, accuracy in self.knn.items()}
        found |= {f"{count}-shot": fmean(accuracies) for count, accuracies in self.few_shot.items()}
        return found if self.linear is None else {**found, "linear": self.linear}

    @property
    def deviations(self) -> dict[str, float]:
        """Standard deviation over the seeds of each few-shot probe."""
        return {f"{count}-shot": stdev(found) for count, found in self.few_shot.items() if len(found) > 1}

    def make_cell(self, column: str) -> Cell:
        """An accuracy with its standard deviation; the best k is marked."""
        accuracy = self.accuracies[column]
        if len(self.knn) > 1 and column == f"k-NN {self.best_k}":
            return Shown(accuracy, f"{100 * accuracy:.1f}*")
        return Mean(accuracy, self.deviations.get(column))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "width": self.width,
            "knn": {str(count): accuracy for count, accuracy in self.knn.items()},
            "best_k": self.best_k,
            "few_shot": {
                str(count): {"mean": fmean(found), "std": stdev(found) if len(found) > 1 else None, "seeds": [*found]}
                for count, found in self.few_shot.items()
            },
            "linear": self.linear,
            "weight_decay": self.weight_decay,
            "spread": self.spread,
            "effective_rank": self.effective_rank,
        }


@dataclass(frozen=True, kw_only=True)
class ProbeTable:
    """The rows of one data set, models first, or their mean over several."""

    data: str
    classes: int | None
    bank_images: int
    query_images: int
    rows: tuple[ProbeRow, ...]

    @property
    def models(self) -> list[ProbeRow]:
        return [row for row in self.rows if row.kind == "model"]

    def compute_gains(self, row: ProbeRow) -> dict[str, float]:
        """How much more accurate each probe of a model is than the better of its baselines; empty without any."""
        others = [self.rows[index].accuracies for index in row.baselines]
        if not others:
            return {}
        return {name: value - max(other[name] for other in others) for name, value in row.accuracies.items()}

    def to_json(self) -> dict[str, Any]:
        rows = [
            {**row.to_json(), **({"over_baseline": gains} if (gains := self.compute_gains(row)) else {})}
            for row in self.rows
        ]
        return {
            "data": self.data,
            "classes": self.classes,
            "training_images": self.bank_images,
            "images": self.query_images,
            "rows": rows,
        }

    @property
    def table(self) -> Table:
        """One row per row of features, then how much better the models are than their baselines."""
        names = list(self.rows[0].accuracies)
        gains = [(row, found) for row in self.models if (found := self.compute_gains(row))]
        rows: list[Sequence[Cell]] = [
            (
                Shown(row.name, shorten(row)),
                *map(row.make_cell, names),
                row.spread,
                Shown(row.effective_rank, f"{row.effective_rank:.0f} of {row.width}"),
            )
            for row in self.rows
        ]
        for row, found in gains:
            label = f"{shorten(row)} over baseline" if len(gains) > 1 else "over the better baseline"
            rows.append((label, *(Shown(found[name], f"{100 * found[name]:+.1f}") for name in names), None, None))
        classes = "" if self.classes is None else f" of {self.classes} classes"
        return Table(
            title=f"{make_printable(self.data, MAX_NAME_LENGTH)}: {format_count(self.query_images, 'image')}{classes}, "
            f"classified by {format_count(self.bank_images, 'training image')}; accuracy in %",
            columns=(
                Column(name="features"),
                *(Column(name=name, unit="%", digits=1) for name in names),
                Column(name="spread", digits=2),
                Column(name="rank"),
            ),
            rows=rows,
            repeated=1,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The tables of all data sets; `print` shows them, `plot()` draws them, a notebook displays them."""

    tables: tuple[ProbeTable, ...]
    layer: str = "last"
    skipped: tuple[str, ...] = ()  # unreadable images and why, one line each
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def mean(self) -> ProbeTable:
        """The mean over the data sets, of the probes that all of them have; the only table, if there is one."""
        if len(self.tables) == 1:
            return self.tables[0]
        return ProbeTable(
            data=f"mean of {len(self.tables)} data sets",
            classes=None,
            bank_images=sum(each.bank_images for each in self.tables),
            query_images=sum(each.query_images for each in self.tables),
            rows=tuple(average_rows(rows) for rows in zip(*(each.rows for each in self.tables), strict=True)),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "tables": [each.to_json() for each in self.tables],
            "mean": self.mean.to_json() if len(self.tables) > 1 else None,
            "skipped": list(self.skipped),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    @property
    def table(self) -> Table:
        """The table of the data set; of several, all their rows and those of the mean, with the name of the data."""
        notes = tuple(filter(None, [self.format_legend()]))
        if len(self.tables) == 1:
            return replace(self.tables[0].table, notes=notes)
        tables = [each.table.with_labels(data=each.data) for each in (*self.tables, self.mean)]
        columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
        rows = [dict(zip(table.columns, row, strict=True)) for table in tables for row in table.rows]
        return Table(columns=columns, rows=[[row.get(column) for column in columns] for row in rows], notes=notes)

    def __str__(self) -> str:
        tables = [each.table for each in (*self.tables, *([self.mean] if len(self.tables) > 1 else []))]
        return "\n\n".join(filter(None, (*map(str, tables), self.format_legend(), self.format_skipped())))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def format_legend(self) -> str:
        marks = ["* best k"] if any(len(row.knn) > 1 for row in self.tables[0].rows) else []
        deviations = ["± standard deviation over seeds"] if any(row.deviations for row in self.tables[0].rows) else []
        return "; ".join([*marks, *deviations])

    def format_skipped(self) -> str:
        if not self.skipped:
            return ""
        more = [f"and {len(self.skipped) - MAX_LISTED_ROWS:,} more"] if len(self.skipped) > MAX_LISTED_ROWS else []
        lines = [make_printable(each, 100) for each in self.skipped[:MAX_LISTED_ROWS]]
        return "\n".join([f"{len(self.skipped):,} unreadable, skipped:", *lines, *more])

    def plot(self) -> CaptionedFigure:
        """Bars of every probe, with the baselines next to the models; needs matplotlib."""
        return draw_probe_table(self.mean)


def average_rows(rows: Sequence[ProbeRow]) -> ProbeRow:
    """The mean of the same row over data sets; few-shot by seed."""

    def average(get: Callable[[ProbeRow], float | None]) -> float | None:
        values = [get(row) for row in rows]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) else None

    first = rows[0]
    counts = [count for count in first.knn if all(count in row.knn for row in rows)]
    shots = [count for count in first.few_shot if all(count in row.few_shot for row in rows)]
    return ProbeRow(
        name=first.name,
        kind=first.kind,
        width=first.width,
        knn={count: fmean(row.knn[count] for row in rows) for count in counts},
        few_shot={
            count: tuple(map(fmean, zip(*(row.few_shot[count] for row in rows), strict=True))) for count in shots
        },
        linear=average(lambda row: row.linear),
        spread=fmean(row.spread for row in rows),
        effective_rank=fmean(row.effective_rank for row in rows),
        baselines=first.baselines,
    )


def shorten(row: ProbeRow) -> str:
    return make_printable(row.name, MAX_NAME_LENGTH)


def draw_probe_table(table: ProbeTable) -> CaptionedFigure:
    """Bars of all probes: models in colors, baselines in gray."""
    names = [*table.rows[0].accuracies]
    values = np.array([[100 * row.accuracies[name] for name in names] for row in table.rows])
    best = ", ".join(f"{row.name} {max(row.accuracies.values(), default=0):.1%}" for row in table.rows)
    return CaptionedFigure(
        name="probe",
        title=f"Accuracy of frozen features on {table.data}",
        caption=f"Accuracy of {', '.join(names)} with the features of each row. The highest: {best}.",
        arrays={"accuracy": values, "probes": np.array(names), "rows": np.array([row.name for row in table.rows])},
        draw=lambda: draw_bars(table, names, values),
    )


def draw_bars(table: ProbeTable, names: list[str], values: Any) -> "Figure":
    figure = new_figure(max(6.0, 1.5 + 0.22 * values.size), 4)
    axes, width = figure.subplots(), 0.8 / len(table.rows)
    models = baselines = 0
    for place, row in enumerate(table.rows):
        if row.kind == "model":
            style: dict[str, Any] = {"color": PALETTE[models % len(PALETTE)]}
            models += 1
        else:
            hatch = BASELINE_HATCHES[baselines % len(BASELINE_HATCHES)]
            style = {"facecolor": PALE, "edgecolor": GRAY, "hatch": hatch, "linewidth": 0.6}
            baselines += 1
        errors = [100 * row.deviations.get(name, 0.0) for name in names]
        bars = axes.bar(np.arange(len(names)) + (place + 0.5) * width - 0.4, values[place], width, **style)
        bars.set_label(f"row {place}")
        centers = [bar.get_x() + width / 2 for bar in bars]
        axes.errorbar(centers, values[place], errors, fmt="none", ecolor="black", elinewidth=0.8)
    style_axes(axes, f"{sanitize_label(table.data, MAX_NAME_LENGTH)}: accuracy (%)")
    axes.set_xticks(range(len(names)), names, fontsize=LABEL_POINTS)
    axes.set(ylim=(0, 1.2 * float(values.max(initial=1))), yticks=range(0, 101, 20))  # room for the legend
    legend = axes.legend(frameon=False, fontsize=NOTE_POINTS, ncols=min(4, len(table.rows)), loc="upper left")
    for text, row in zip(legend.get_texts(), table.rows, strict=True):
        text.set(text=sanitize_label(row.name, MAX_NAME_LENGTH), parse_math=False)
    return figure


def write_probe(result: ProbeResult, report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the report as JSON and the figure to a folder."""
    numbers = folder / PROBE_FILES[0]
    write_text(numbers, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return [numbers, *result.plot().save(folder)]
