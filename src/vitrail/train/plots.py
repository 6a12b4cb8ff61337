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
from vitrail.tasks.metric import CLASSIFICATION_METRICS, Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_SHARE_RANGE = 20  # percentage points on the axis of shares, so that noise does not look like progress

Records = Sequence[Mapping[str, float]]  # of the log of a run


def plot_training_curves(
    runs: Mapping[str, Records], path: Path, metrics: Sequence[Metric] = CLASSIFICATION_METRICS[:1]
) -> None:
    save_figure(draw_training_curves(runs, metrics), path)


def draw_training_curves(
    runs: Mapping[str, Records], metrics: Sequence[Metric] = CLASSIFICATION_METRICS[:1]
) -> "Figure":
    """Losses and the metrics that count over the epochs: the losses of one run in one panel, of several runs in two.

    A validation loss that is not in the logs has no panel, and neither has a metric that is the loss itself.
    """
    single = len(runs) == 1
    counted = list({each.name: each for each in metrics if each.name != "loss"}.values())
    is_evaluated = any("val_loss" in row for records in runs.values() for row in records)
    loss_names = ["loss", *["val_loss"] * (is_evaluated or CLASSIFICATION_METRICS[0] in counted)]
    loss_panels = 1 if single else len(loss_names)
    columns = loss_panels + len(counted)
    figure = new_figure(FIGURE_WIDTH, 3.5 + 0.25 * ceil(len(runs) / 4) * (not single))
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    curves: list[tuple[Any, str, int]] = [
        *((panels[0 if single else place], name, 1) for place, name in enumerate(loss_names)),
        *(
            (axes, f"val_{metric.name}", 100 if metric.is_share else 1)
            for axes, metric in zip(panels[loss_panels:], counted, strict=True)
        ),
    ]
    lines = list[Any]()
    for number, records in enumerate(runs.values()):
        colour = COLOURS[number % len(COLOURS)]
        style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
        for axes, name, scale in curves:
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
