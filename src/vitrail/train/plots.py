"""Plots of training: curves of losses and metrics. Needs matplotlib."""

import re
from collections.abc import Iterable, Mapping, Sequence
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
from vitrail.tasks.collapse import COLLAPSED
from vitrail.tasks.metric import CLASSIFICATION_METRICS, Metric
from vitrail.train.callbacks import LOOP_VALUES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_MONITORS_PER_ROW = 3
MIN_SHARE_RANGE = 20  # percentage points on the axis of shares, so that noise does not look like progress

Records = Sequence[Mapping[str, float]]  # of the log of a run


def plot_training_curves(
    runs: Mapping[str, Records],
    path: Path,
    metrics: Sequence[Metric] = CLASSIFICATION_METRICS[:1],
    others: Sequence[Metric] = (),
) -> None:
    save_figure(draw_training_curves(runs, metrics, others), path)


def choose_metrics(metrics: Sequence[Metric], *runs: Records) -> tuple[list[Metric], list[Metric]]:
    """The metrics of a task for the first row of panels, and those of evaluations for the rows below it.

    The first metric counts. If it is the loss, the first share that is in the logs is next to it, such as k-NN.
    """
    if metrics[0] == CLASSIFICATION_METRICS[0]:
        return [metrics[0]], []
    logged = {name for records in runs for row in records for name in row}
    rest = [each for each in metrics[1:] if f"val_{each.name}" in logged and each.name != "loss"]
    shares = [each for each in rest if each.is_share][: int(metrics[0].name == "loss")]
    return [metrics[0], *shares], [each for each in rest if each not in shares]


def draw_training_curves(
    runs: Mapping[str, Records],
    metrics: Sequence[Metric] = CLASSIFICATION_METRICS[:1],
    others: Sequence[Metric] = (),
) -> "Figure":
    """Losses and the metrics that count over the epochs: the losses of one run in one panel, of several runs in two.

    A validation loss that is not in the logs has no panel, and neither has a metric that is the loss itself. Below are
    panels for `others` and for the metrics of training, such as the spread of the features.
    """
    single = len(runs) == 1
    counted = list({each.name: each for each in metrics if each.name != "loss"}.values())
    is_evaluated = any("val_loss" in row for records in runs.values() for row in records)
    loss_names = ["loss", *["val_loss"] * (is_evaluated or CLASSIFICATION_METRICS[0] in counted)]
    loss_panels = 1 if single else len(loss_names)
    columns = loss_panels + len(counted)
    monitors = list_monitors(runs.values(), counted, others)
    height = 3.5 + 0.25 * ceil(len(runs) / 4) * (not single) + 2.8 * ceil(len(monitors) / MAX_MONITORS_PER_ROW)
    figure = new_figure(FIGURE_WIDTH, height)
    panels, below = add_panels(figure, columns, len(monitors))
    curves: list[tuple[Any, str, int]] = [
        *((panels[0 if single else place], name, 1) for place, name in enumerate(loss_names)),
        *(
            (axes, f"val_{metric.name}", 100 if metric.is_share else 1)
            for axes, metric in zip(panels[loss_panels:], counted, strict=True)
        ),
    ]
    lines = list[Any]()
    for number, records in enumerate(runs.values()):
        for axes, name, scale in curves:
            lines.append(draw_curve(axes, records, name, scale, number))
            if single and name == "val_loss":
                lines[-1].set_color(RED)
        for axes, metric in zip(below, monitors, strict=True):
            draw_monitor(axes, records, metric, number, single=single)
    for axes in (*panels, *below):
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25, linewidth=0.6)
    for axes in panels[:loss_panels]:
        axes.set_ylabel("loss")
        if all(value >= 0 for line in axes.lines for value in line.get_ydata()):
            axes.set_ylim(bottom=0)
    for axes, title in zip(panels, ("loss",) if single else ("training loss", "validation loss"), strict=False):
        style_axes(axes, title)
    for axes, metric in zip(panels[loss_panels:], counted, strict=True):
        style_metric_axes(axes, metric)
    if single:
        if len(loss_names) > 1:
            panels[0].legend(lines[:2], ("training", "validation"), frameon=False, fontsize=9)
        return figure
    legend = figure.legend(
        lines[:: len(curves)], ["" for _ in runs], loc="outside lower center", ncols=min(len(runs), 4), frameon=False
    )
    for text, name in zip(legend.get_texts(), runs, strict=True):
        text.set(text=sanitize_label(name), parse_math=False)
    return figure


def list_monitors(runs: Iterable[Records], counted: Sequence[Metric], others: Sequence[Metric]) -> list[Metric]:
    """The metrics below the first row: those of training, and `others`. Accuracy is shown by the first row."""
    training = {name: None for records in runs for row in records if "loss" in row for name in row}
    hidden = {*LOOP_VALUES, "accuracy", *(each.name for each in counted)}
    names = [name for name in training if name not in hidden and not re.match(r"val_|.*_per_second$", name)]
    known = {each.name: each for each in others}
    made = {name: known.get(name) or Metric(name=name, label=name.replace("_", " ")) for name in names}
    return list({**made, **known}.values())


def add_panels(figure: "Figure", columns: int, monitors: int) -> tuple[list[Any], list[Any]]:
    """A row of `columns` panels, and below it the panels of the monitors."""
    rows = ceil(monitors / MAX_MONITORS_PER_ROW)
    in_row = ceil(monitors / max(rows, 1)) or 1
    grid = figure.add_gridspec(1 + rows, columns * in_row)
    first = [figure.add_subplot(grid[0, in_row * place : in_row * (place + 1)]) for place in range(columns)]
    places = [(1 + number // in_row, number % in_row * columns) for number in range(monitors)]
    return first, [figure.add_subplot(grid[row, start : start + columns]) for row, start in places]


def draw_curve(axes: Any, records: Records, name: str, scale: int, number: int) -> Any:
    """A metric of a run over the epochs. `number` is that of the run, for its colour and its style."""
    points = [(row["epoch"], row[name] * scale) for row in records if name in row and "epoch" in row]
    epochs, values = zip(*points, strict=True) if points else ((), ())
    style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
    (line,) = axes.plot(epochs, values, style, color=COLOURS[number % len(COLOURS)], markersize=4, linewidth=1.6)
    if name.startswith("val_") or len(points) == 1:
        line.set_marker("o")
    return line


def draw_monitor(axes: Any, records: Records, metric: Metric, number: int, *, single: bool) -> None:
    """A metric in training and, with dots, in evaluations; a dotted line marks a collapse."""
    scale = 100 if metric.is_share else 1
    for name in (metric.name, f"val_{metric.name}"):
        if any(name in row for row in records):
            line = draw_curve(axes, records, name, scale, number)
            if single and name != metric.name:
                line.set_color(RED)
    for row in records:
        if COLLAPSED in row:
            axes.axvline(row["epoch"], color=RED, linestyle=":", linewidth=1)
            axes.text(
                row["epoch"], 1, " collapsed", color=RED, fontsize=8, va="top", transform=axes.get_xaxis_transform()
            )
    axes.set_ylabel("%" if metric.is_share else "")
    style_axes(axes, "")
    axes.set_title(sanitize_label(metric.label), fontsize=11, loc="left", parse_math=False)


def style_metric_axes(axes: Any, metric: Metric) -> None:
    """Title, label and limits; a share is in per cent, with the good end of the scale on the axis."""
    label, quantity = (sanitize_label(text) for text in (metric.label, metric.quantity))
    values = [value for line in axes.lines for value in line.get_ydata()]
    if metric.is_share and metric.higher_is_better:
        axes.set_ylim(min(floor(min(values, default=0) / 10) * 10, 100 - MIN_SHARE_RANGE), 101)
    elif metric.is_share:
        axes.set_ylim(-1, max(ceil(max(values, default=100) / 10) * 10, MIN_SHARE_RANGE))
    unit = "%" if metric.is_share else ""
    notes = ", ".join(filter(None, (unit, "" if metric.higher_is_better else "lower is better")))
    axes.set_ylabel(f"{quantity or label} ({notes})" if notes else quantity or label, parse_math=False)
    title = f"validation {quantity} ({label})" if quantity else f"validation {label}"
    style_axes(axes, title)
    axes.set_title(title, fontsize=11, loc="left", parse_math=False)  # a label may have a $
