"""Plots of training: curves of losses and metrics. Needs matplotlib."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.base.figures import measure_text, new_figure, sanitize_label, save_figure, style_axes, wrap_label
from vitrail.base.style import FIGURE_WIDTH, LABEL_POINTS, NOTE_POINTS, PALETTE, RED, TITLE_POINTS, WRONG
from vitrail.tasks.metric import CLASSIFICATION_METRICS, COLLAPSED, LOSS_METRIC, Metric
from vitrail.train.callbacks import LOOP_VALUES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS_PER_ROW, PANEL_HEIGHT = 3, 2.9  # inches
CHARACTERS_PER_INCH = 12  # of a title
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


class CurvePanel(NamedTuple):
    """A panel: the values of the log that it shows, those of training first."""

    title: str
    metric: Metric
    names: tuple[str, ...]
    is_monitor: bool = False

    def find_points(self, records: Records, name: str) -> list[tuple[float, float]]:
        """Epochs and values; shares are in per cent."""
        scale = 100 if self.metric.is_share else 1
        return [(row["epoch"], row[name] * scale) for row in records if name in row and "epoch" in row]

    def has_curve(self, runs: Iterable[Records]) -> bool:
        """Whether a run has two points: one is a value, not a curve."""
        return any(len(self.find_points(records, name)) > 1 for records in runs for name in self.names)

    def list_values(self, records: Records) -> list[str]:
        """The value of each name in words, for a panel that is not drawn."""
        last = {name: row[name] for row in records for name in self.names if name in row}
        title = sanitize_label(self.title)
        return [f"{title} {self.metric.format_value(value)}" for value in [*last.values()][-1:]]


def draw_training_curves(
    runs: Mapping[str, Records],
    metrics: Sequence[Metric] = CLASSIFICATION_METRICS[:1],
    others: Sequence[Metric] = (),
) -> "Figure":
    """Losses and the metrics that count over the epochs: the losses of one run in one panel, of several runs in two.

    Below are panels for `others` and for the metrics of training, such as the spread of the features. What has fewer
    than two points in every run has no panel; its value is in the title, or next to the name of the run.
    """
    single = len(runs) == 1
    panels = list_panels(runs, metrics, others)
    drawn = [each for each in panels if each.has_curve(runs.values())]
    monitors = sum(each.is_monitor for each in drawn)
    per_row = [*split_into_rows(len(drawn) - monitors), *split_into_rows(monitors)]
    notes = [[text for each in panels if each not in drawn for text in each.list_values(own)] for own in runs.values()]
    names = [
        wrap_note(": ".join(filter(None, (sanitize_label(name), ", ".join(of_run)))))
        for name, of_run in zip(runs, notes, strict=True)
    ]
    widest = max((measure_text(line, LABEL_POINTS) for name in names for line in name.split("\n")), default=0.0)
    columns = max(1, min(len(runs), 4, int(FIGURE_WIDTH / (widest + 0.6))))
    lines_below = ceil(len(runs) / columns) if columns > 1 else sum(name.count("\n") + 1 for name in names)
    figure = new_figure(FIGURE_WIDTH, 0.6 + PANEL_HEIGHT * len(per_row) + 0.22 * lines_below * (not single))
    grid = figure.add_gridspec(max(1, len(per_row)), 6)  # six is two panels of three columns, three of two
    places = [(row, 6 // count, number) for row, count in enumerate(per_row) for number in range(count)]
    all_axes = [figure.add_subplot(grid[row, span * number : span * (number + 1)]) for row, span, number in places]
    for axes, panel, (_, span, _) in zip(all_axes, drawn, places, strict=True):
        draw_panel(axes, panel, runs, characters=int((FIGURE_WIDTH * span / 6 - 0.7) * CHARACTERS_PER_INCH))
    if single:
        text = wrap_note(", ".join(notes[0])) if drawn or notes[0] else "no values in the log"
        if text:
            figure.suptitle(text, fontsize=LABEL_POINTS, x=0.01, ha="left", parse_math=False)
        return figure

    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **style_run(number)) for number in range(len(runs))]
    legend = figure.legend(
        lines, ["" for _ in runs], loc="outside lower center", ncols=columns, frameon=False, fontsize=LABEL_POINTS
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=name, parse_math=False)
    return figure


def wrap_note(text: str) -> str:
    """Break values in words into lines that fit into the width of a figure, next to a line of the legend."""
    width, room = measure_text(text, LABEL_POINTS), FIGURE_WIDTH - 0.9
    return text if width <= room else fill(text, int(0.9 * room / width * len(text)))  # letters differ in width


def list_panels(runs: Mapping[str, Records], metrics: Sequence[Metric], others: Sequence[Metric]) -> list[CurvePanel]:
    """The losses, the metrics that count, and the monitors; some of them may have no values."""
    counted = list({each.name: each for each in metrics if each.name != "loss"}.values())
    losses = ("loss", "val_loss")
    return [
        *(
            [CurvePanel("loss", LOSS_METRIC, losses)]
            if len(runs) == 1
            else [
                CurvePanel(f"{part} loss", LOSS_METRIC, (name,))
                for part, name in zip(("training", "validation"), losses, strict=True)
            ]
        ),
        *(
            CurvePanel(
                f"validation {each.quantity} ({each.label})" if each.quantity else f"validation {each.label}",
                each,
                (f"val_{each.name}",),
            )
            for each in counted
        ),
        *(
            CurvePanel(each.label, each, (each.name, f"val_{each.name}"), is_monitor=True)
            for each in list_monitors(runs.values(), counted, others)
        ),
    ]


def list_monitors(runs: Iterable[Records], counted: Sequence[Metric], others: Sequence[Metric]) -> list[Metric]:
    """The metrics below the first row: those of training, and `others`. Accuracy is shown by the first row."""
    training = {name: None for records in runs for row in records if "loss" in row for name in row}
    hidden = {*LOOP_VALUES, "accuracy", *(each.name for each in counted)}
    names = [name for name in training if name not in hidden and not re.match(r"val_|.*_per_second$", name)]
    known = {each.name: each for each in others}
    made = {name: known.get(name) or Metric(name=name, label=name.replace("_", " ")) for name in names}
    return list({**made, **known}.values())


def split_into_rows(panels: int) -> list[int]:
    """How many panels each row has, at most three and about as many in each."""
    rows = ceil(panels / MAX_PANELS_PER_ROW)
    return [panels // rows + (row < panels % rows) for row in range(rows)]


def style_run(number: int) -> dict[str, Any]:
    """The color and the line style of a run among others."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": ("-", "--", ":", "-.")[number // len(PALETTE) % 4],
        "linewidth": 1.6,
    }


def draw_panel(axes: Any, panel: CurvePanel, runs: Mapping[str, Records], *, characters: int) -> None:
    """Draw a panel for all runs: values of evaluations have dots; a dotted line marks a collapse."""
    single, metric, lines = len(runs) == 1, panel.metric, dict[str, Any]()
    for number, records in enumerate(runs.values()):
        for name in panel.names:
            points = panel.find_points(records, name)
            if not points and len(panel.names) > 1:
                continue
            epochs, values = zip(*points, strict=True) if points else ((), ())
            (lines[name],) = axes.plot(epochs, values, **style_run(number), markersize=4)
            if name.startswith("val_"):
                lines[name].set(marker="o", **({"color": RED} if single and len(panel.names) > 1 else {}))
        if panel.is_monitor:
            mark_collapse(axes, records)
    if single and len(lines) > 1:
        axes.legend(lines.values(), ("training", "validation"), frameon=False, fontsize=LABEL_POINTS)
    axes.set_xlabel("epoch")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    style_axes(axes, "")
    title = wrap_label(panel.title, characters)
    axes.set_title(title, fontsize=TITLE_POINTS, loc="left", parse_math=False)  # a label may have a $
    axes.set_ylabel("%" if panel.is_monitor and metric.is_share else "")
    if not panel.is_monitor:
        scale_axes(axes, metric)


def mark_collapse(axes: Any, records: Records) -> None:
    for row in records:
        if COLLAPSED in row:
            axes.axvline(row["epoch"], color=RED, linestyle=":", linewidth=1)
            place = {"va": "top", "transform": axes.get_xaxis_transform()}
            axes.text(row["epoch"], 1, " collapsed", color=WRONG, fontsize=NOTE_POINTS, **place)


def scale_axes(axes: Any, metric: Metric) -> None:
    """Label and limits; a loss starts at 0, a share is in per cent, with the good end of the scale on the axis."""
    values = [value for line in axes.lines for value in line.get_ydata()]
    if metric.name == "loss":
        axes.set_ylabel("loss")
        if min(values, default=0) >= 0:
            axes.set_ylim(bottom=0)
        return
    if metric.is_share and metric.higher_is_better:
        axes.set_ylim(min(floor(min(values, default=0) / 10) * 10, 100 - MIN_SHARE_RANGE), 101)
    elif metric.is_share:
        axes.set_ylim(-1, max(ceil(max(values, default=100) / 10) * 10, MIN_SHARE_RANGE))
    notes = ", ".join(filter(None, ("%" * metric.is_share, "" if metric.higher_is_better else "lower is better")))
    label = metric.quantity or metric.label
    characters = int(PANEL_HEIGHT * 0.8 * CHARACTERS_PER_INCH)
    axes.set_ylabel(wrap_label(f"{label} ({notes})" if notes else label, characters), parse_math=False)
