"""Figure of a probe table. Needs matplotlib."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label, style_axes
from vitrail.base.files import write_text
from vitrail.base.style import GREY, LABEL_POINTS, NOTE_POINTS, PALE, PALETTE
from vitrail.evaluation.probes.probe_results import MAX_NAME_LENGTH, ProbeResult, ProbeTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBE_FILES = ("probe.json", "probe.png")
BASELINE_HATCHES = ("", "///", "...")


def plot_probe_table(table: ProbeTable) -> CaptionedFigure:
    """Bars of all probes: models in colours, baselines in grey."""
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
            style = {"facecolor": PALE, "edgecolor": GREY, "hatch": hatch, "linewidth": 0.6}
            baselines += 1
        errors = [100 * row.deviations.get(name, 0.0) for name in names]
        bars = axes.bar(np.arange(len(names)) + (place + 0.5) * width - 0.4, values[place], width, **style)
        bars.set_label(f"row {place}")
        centres = [bar.get_x() + width / 2 for bar in bars]
        axes.errorbar(centres, values[place], errors, fmt="none", ecolor="black", elinewidth=0.8)
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
