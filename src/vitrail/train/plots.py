"""Plots of training: curves of losses and metrics. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.figures import (
    COLOURS,
    FIGURE_WIDTH,
    RED,
    new_figure,
    sanitize_label,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_ACCURACY_RANGE = 20  # percentage points on the axis of accuracies, so that noise does not look like progress

Records = Sequence[Mapping[str, float]]  # of the log of a run


def plot_training_curves(runs: Mapping[str, Records], path: Path) -> None:
    save_figure(draw_training_curves(runs), path)


def draw_training_curves(runs: Mapping[str, Records]) -> "Figure":
    """Losses and validation accuracy over the epochs: one run in two panels, several runs in three."""
    single = len(runs) == 1
    figure = new_figure(FIGURE_WIDTH, 3.5 + 0.25 * ceil(len(runs) / 4) * (not single))
    panels = figure.subplots(1, 2 if single else 3)
    train, val, top1 = (panels[0], *panels) if single else panels
    lines = list[Any]()
    for number, records in enumerate(runs.values()):
        colour = COLOURS[number % len(COLOURS)]
        style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
        for axes, name, scale in ((train, "loss", 1), (val, "val_loss", 1), (top1, "val_top1", 100)):
            points = [(row["epoch"], row[name] * scale) for row in records if name in row and "epoch" in row]
            epochs, values = zip(*points, strict=True) if points else ((), ())
            (line,) = axes.plot(epochs, values, style, color=colour, markersize=4, linewidth=1.6)
            if name != "loss" or len(points) == 1:
                line.set_marker("o")
            if single and name == "val_loss":
                line.set_color(RED)
            lines.append(line)
    for axes in panels:
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25, linewidth=0.6)
    for axes in panels[:-1]:
        axes.set_ylabel("loss")
        if all(value >= 0 for line in axes.lines for value in line.get_ydata()):
            axes.set_ylim(bottom=0)
    lowest = min((value for line in top1.lines for value in line.get_ydata()), default=0)
    top1.set(ylabel="accuracy (%)", ylim=(min(floor(lowest / 10) * 10, 100 - MIN_ACCURACY_RANGE), 101))
    for axes, title in zip(panels, ("loss",) if single else ("training loss", "validation loss"), strict=False):
        style_axes(axes, title)
    style_axes(top1, "validation accuracy (top-1)")
    if single:
        train.legend(lines[:2], ("training", "validation"), frameon=False, fontsize=9)
        return figure
    legend = figure.legend(
        lines[::3], ["" for _ in runs], loc="outside lower center", ncols=min(len(runs), 4), frameon=False
    )
    for text, name in zip(legend.get_texts(), runs, strict=True):
        text.set(text=sanitize_label(name), parse_math=False)
    return figure
