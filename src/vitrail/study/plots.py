"""Plots of comparisons, ablations and the position study. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.figures import measure_text, new_figure, sanitize_label, save_figure, style_axes, wrap_label
from vitrail.base.style import (
    BLUE,
    FIGURE_WIDTH,
    GREY,
    LABEL_POINTS,
    NOTE_POINTS,
    PALETTE,
    RED,
    SHARE_MAP,
    TITLE_POINTS,
)
from vitrail.study.ablation_results import AblationResults, format_failure
from vitrail.study.compare_results import Comparison
from vitrail.study.position_study import PAPER_SETTING, POSITION_CELLS, PositionStudyResults
from vitrail.study.result_files import format_json, write_texts_to_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARISON_FILES = ("comparison.json", "comparison.png")
MAX_VOTERS_WITH_NUMBERS, MAX_VOTERS_WITH_LABELS = 16, 60  # in the matrix


def draw_comparison(result: Comparison) -> "Figure":
    """Draw the matrix of disagreement and, for distilled models, the similarity of the two tokens by layer."""
    voters, lines = len(result.voters), bool(result.similarities)
    names = [wrap_label(f"{number}  {each.name}", 36) for number, each in enumerate(result.voters)]
    labelled = voters <= MAX_VOTERS_WITH_LABELS
    side = min(max(3.0, 0.6 * voters), 13.0)
    margin = labelled * max(measure_text(line, NOTE_POINTS) for name in names for line in name.split("\n"))
    figure = new_figure(side + margin + (6.2 if lines else 1.2), side + 1)
    left, *others = figure.subplots(
        1, 2 if lines else 1, squeeze=False, width_ratios=(side + margin, 5) if lines else None
    )[0]

    percents = [[100 * share for share in row] for row in result.disagreement]
    highest = max(map(max, percents)) or 1.0
    left.imshow(percents, cmap=SHARE_MAP, vmin=0, vmax=highest)
    style_axes(left, f"classified differently, % of {result.images:,} images")
    if labelled:
        left.set_yticks(range(voters), names, fontsize=NOTE_POINTS, parse_math=False)
        left.set_xticks(range(voters), [str(number) for number in range(voters)], fontsize=NOTE_POINTS)
        left.set_xlabel("the same, by number", fontsize=NOTE_POINTS)
    if voters <= MAX_VOTERS_WITH_NUMBERS:
        for row, values in enumerate(percents):
            for column, value in enumerate(values):
                colour = "white" if value > 0.6 * highest else "black"
                left.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=NOTE_POINTS, color=colour)

    for axes in others:
        for number, each in enumerate(result.similarities):
            colour = PALETTE[number % len(PALETTE)]
            axes.plot(each.layers, color=colour, marker="o", markersize=4, linewidth=1.6)
            axes.plot(len(each.layers) - 0.5, each.end, color=colour, marker="D", markersize=6, linestyle="")
        style_axes(axes, "cosine similarity of class and distillation tokens\n(◆ after the final norm)")
        axes.set(xlabel="after the embedding (0) and each block", ylim=(min(0, *axes.get_ylim()), 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        rows = [axes.lines[2 * number] for number in range(len(result.similarities))]
        legend = axes.legend(rows, ["" for _ in rows], frameon=False, fontsize=NOTE_POINTS)
        for text, each in zip(legend.get_texts(), result.similarities, strict=True):
            text.set(text=wrap_label(each.model, 36), parse_math=False)
    return figure


def write_comparison(result: Comparison, report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the report as JSON and the plot of a comparison to a folder."""
    numbers, plot = COMPARISON_FILES
    write_texts_to_folder(folder, {numbers: format_json(report)})
    save_figure(draw_comparison(result), folder / plot)
    return [folder / numbers, folder / plot]


def draw_ablation(results: AblationResults) -> "Figure | None":
    """Draw the gain or loss of each row relative to the full one; None if there is nothing to draw."""
    full, rest = results.lines[0], results.lines[1:]
    metric, mean = results.metric, full.mean
    if mean is None or not rest:
        return None
    names = [wrap_label(line.row.name, 28) for line in rest]
    figure = new_figure(FIGURE_WIDTH, 1.4 + 0.34 * sum(1 + 0.3 * name.count("\n") for name in names))
    axes = figure.subplots()
    setting = f"{sanitize_label(results.recipe)} on {sanitize_label(Path(results.data).name)}"
    style_axes(axes, "")
    axes.set_title(f"{setting}: full {metric.format_value(mean)}", fontsize=TITLE_POINTS, loc="left", parse_math=False)
    ends = [0.0]
    for place, line in enumerate(rest):
        gain, std = results.gain(line) or 0.0, results.scale * (line.std or 0.0)
        colour, side = (RED, -1) if gain < 0 else (BLUE, 1)
        axes.barh(place, gain, color=colour, alpha=0.85, xerr=std or None, ecolor=GREY)
        ends.append(gain + side * std)
        label = results.format_gain(line).replace("-", "−") or format_failure(line)
        style: dict[str, Any] = {"va": "center", "ha": "left" if side > 0 else "right", "fontsize": LABEL_POINTS}
        axes.annotate(label, (ends[-1], place), (4 * side, 0), textcoords="offset points", **style)
    axes.axvline(0, color=GREY, linewidth=1)
    room = 0.2 * (max(ends) - min(ends) or 1.0)  # of the values next to the bars
    axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.set_yticks(range(len(rest)), names, fontsize=LABEL_POINTS, parse_math=False)
    axes.invert_yaxis()
    label = f"validation {sanitize_label(metric.label)} relative to the full recipe"
    is_repeated = any(line.std is not None for line in rest)
    notes = [
        *["percentage points"] * metric.is_share,
        *["positive is better"] * (not metric.higher_is_better),
        *["whiskers: standard deviation over seeds"] * is_repeated,
    ]
    axes.set_xlabel(f"{label}\n({'; '.join(notes)})" if notes else label, parse_math=False)
    return figure


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
            draw_lollipop(left, place, 100 * none, 100 * none, GREY, format_failure(line), marker="")
        else:
            label = f"{mean:.2%}" if place == 0 else f"{ablation.gain(line):+.2f}"
            draw_lollipop(left, place, 100 * none, 100 * mean, BLUE, label, others=shares)
        label = f"{cell.paper:.2%}" if place == 0 else f"{cell.paper_points:+.2f}"
        draw_lollipop(right, place, 0, cell.paper_points, GREY, label)
    left.set_yticks(range(len(POSITION_CELLS)), [str(cell) for cell in POSITION_CELLS], fontsize=LABEL_POINTS)
    left.invert_yaxis()
    style_axes(right, f"paper: points above none\n({PAPER_SETTING})")
    for axes, start in ((left, 100 * none), (right, 0)):
        axes.axvline(start, color=GREY, linewidth=1, linestyle="--")
        axes.margins(x=0.15)
    return figure


def draw_lollipop(
    axes: Any,
    place: int,
    start: float,
    end: float,
    colour: str,
    label: str,
    *,
    marker: str = "D",
    others: Sequence[float] = (),
) -> None:
    """Draw a value with a line from `start`, dots for `others` if there are several, and its label to the right."""
    axes.plot([start, end], [place, place], color=colour, linewidth=2, alpha=0.4)
    if len(others) > 1:
        axes.plot(others, [place] * len(others), ".", color=GREY, markersize=6)
    axes.plot(end, place, color=colour, marker=marker, markersize=7)
    after = max((start, end, *others))
    axes.annotate(label, (after, place), (7, 0), textcoords="offset points", va="center", fontsize=LABEL_POINTS)
