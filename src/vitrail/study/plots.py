"""Plots of comparisons, ablations and the position study. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.figures import BLUE, COLOURS, GREY, RED, new_figure, sanitize_label, save_figure, style_axes
from vitrail.study.ablation_results import AblationResults, format_failure
from vitrail.study.compare_results import MAX_NAME_LENGTH, Comparison
from vitrail.study.position_study import PAPER_SETTING, POSITION_CELLS, PositionStudyResults
from vitrail.study.result_files import format_json, write_texts_to_folder

COMPARISON_FILES = ("comparison.json", "comparison.png")
MAX_VOTERS_WITH_NUMBERS, MAX_VOTERS_WITH_LABELS = 16, 60  # in the matrix


def save_comparison_plot(result: Comparison, path: Path) -> None:
    """Plot the matrix of disagreement and, for distilled models, the similarity of the two tokens by layer."""
    voters, lines = len(result.voters), bool(result.similarities)
    side = min(max(4.2, 2.2 + 0.6 * voters), 13.0)
    figure = new_figure(side + (6.2 if lines else 1.2), side)
    left, *others = figure.subplots(1, 2 if lines else 1, squeeze=False, width_ratios=(side, 5) if lines else None)[0]

    percents = [[100 * share for share in row] for row in result.disagreement]
    highest = max(map(max, percents)) or 1.0
    left.imshow(percents, cmap="Blues", vmin=0, vmax=highest)
    style_axes(left, f"classified differently, % of {result.images:,} images")
    if voters <= MAX_VOTERS_WITH_LABELS:
        names = [sanitize_label(each.shorten_name(MAX_NAME_LENGTH), MAX_NAME_LENGTH) for each in result.voters]
        left.set_xticks(
            range(voters), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8, parse_math=False
        )
        left.set_yticks(range(voters), names, fontsize=8, parse_math=False)
    if voters <= MAX_VOTERS_WITH_NUMBERS:
        for row, values in enumerate(percents):
            for column, value in enumerate(values):
                colour = "white" if value > 0.6 * highest else "black"
                left.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)

    for axes in others:
        for number, each in enumerate(result.similarities):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(each.layers, color=colour, marker="o", markersize=4, linewidth=1.6)
            axes.plot(len(each.layers) - 0.5, each.end, color=colour, marker="D", markersize=6, linestyle="")
        style_axes(axes, "cosine similarity of class and distillation tokens\n(◆ after the final norm)")
        axes.set(xlabel="after the embedding (0) and each block", ylim=(min(0, *axes.get_ylim()), 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        rows = [axes.lines[2 * number] for number in range(len(result.similarities))]
        legend = axes.legend(rows, ["" for _ in rows], frameon=False, fontsize=8)
        for text, each in zip(legend.get_texts(), result.similarities, strict=True):
            text.set(text=sanitize_label(each.model), parse_math=False)
    save_figure(figure, path)


def write_comparison(result: Comparison, report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the report as JSON and the plot of a comparison to a folder."""
    numbers, plot = COMPARISON_FILES
    write_texts_to_folder(folder, {numbers: format_json(report)})
    save_comparison_plot(result, folder / plot)
    return [folder / numbers, folder / plot]


def save_ablation_plot(results: AblationResults, path: Path) -> bool:
    """Plot the gain or loss of each row relative to the full one; False if there is nothing to plot."""
    full, rest = results.lines[0], results.lines[1:]
    metric, mean = results.metric, full.mean
    if mean is None or not rest:
        return False
    figure = new_figure(8, 1.4 + 0.34 * len(rest))
    axes = figure.subplots()
    setting = f"{sanitize_label(results.recipe)} on {sanitize_label(Path(results.data).name)}"
    style_axes(axes, f"{setting}: full {metric.format_value(mean)}")
    extents = [abs(results.gain(line) or 0.0) + results.scale * (line.std or 0.0) for line in rest]
    limit = max(extents) or 1.0
    for place, line in enumerate(rest):
        gain, std = results.gain(line), line.std
        value = 0.0 if gain is None else gain
        colour = RED if value < 0 else BLUE
        axes.barh(
            place, value, color=colour, alpha=0.85, xerr=None if std is None else results.scale * std, ecolor=GREY
        )
        label = format_failure(line) if gain is None else results.format_gain(line)
        axes.text(1.02, place, label, va="center", fontsize=9, transform=axes.get_yaxis_transform())
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_xlim(-1.1 * limit, 1.1 * limit)
    axes.set_yticks(range(len(rest)), [sanitize_label(line.row.name) for line in rest], fontsize=9, parse_math=False)
    axes.invert_yaxis()
    label = f"validation {sanitize_label(metric.label)} relative to the full recipe"
    notes = [*["percentage points"] * metric.is_share, *["positive is better"] * (not metric.higher_is_better)]
    axes.set_xlabel(f"{label} ({', '.join(notes)})" if notes else label, parse_math=False)
    save_figure(figure, path)
    return True


def save_position_study_plot(results: PositionStudyResults, path: Path) -> bool:
    """Plot the accuracy of each cell, with a dot per seed, next to the paper's; False if `none` has no result."""
    none = results.ablation.lines[0].mean
    if none is None:
        return False
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    ablation = results.ablation
    style_axes(
        left, f"{sanitize_label(ablation.recipe)} on {sanitize_label(Path(ablation.data).name)}\nvalidation top-1 (%)"
    )
    left.axvline(100 * none, color=GREY, linewidth=1, linestyle="--")
    for place, (cell, line) in enumerate(results.pairs):
        shares, mean, points = line.values, line.mean, ablation.gain(line)
        if mean is None or points is None:
            label = format_failure(line)
        else:
            label = f"{mean:.2%}" if place == 0 else f"{points:+.2f}"
            left.plot([100 * none, 100 * mean], [place, place], color=BLUE, linewidth=2, alpha=0.4)
            left.plot(100 * mean, place, color=BLUE, marker="D", markersize=7)
        if len(shares) > 1:
            left.plot([100 * share for share in shares], [place] * len(shares), ".", color=GREY, markersize=6)
        left.text(1.02, place, label, va="center", fontsize=9, transform=left.get_yaxis_transform())
        right.plot([0, cell.paper_points], [place, place], color=RED, linewidth=2, alpha=0.4)
        right.plot(cell.paper_points, place, color=RED, marker="D", markersize=7)
        label = f"{cell.paper:.2%}" if place == 0 else f"{cell.paper_points:+.2f}"
        right.text(1.02, place, label, va="center", fontsize=9, transform=right.get_yaxis_transform())
    left.set_yticks(range(len(POSITION_CELLS)), [str(cell) for cell in POSITION_CELLS], fontsize=9)
    left.invert_yaxis()
    style_axes(right, f"paper: points above none\n({PAPER_SETTING})")
    right.axvline(0, color=GREY, linewidth=1, linestyle="--")
    save_figure(figure, path)
    return True
