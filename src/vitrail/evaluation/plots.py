"""Plots of an evaluation: confusion matrix and reliability diagram. Needs matplotlib."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.figures import measure_text, new_figure, save_figure, style_axes, wrap_label
from vitrail.base.files import write_text
from vitrail.base.style import BLUE, FIGURE_WIDTH, GRAY, LABEL_POINTS, NOTE_POINTS, RED, SHARE_MAP, SOFT
from vitrail.base.text import format_count
from vitrail.evaluation.metrics import CalibrationBin, Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL_EVIDENCE = 0.05  # share of the images from which a bin is drawn in full color
EVALUATION_FILES = ("confusion.png", "reliability.png", "evaluation.json")
# the largest confusion matrix that shows them
MAX_CLASSES_WITH_COUNTS, MAX_CLASSES_WITH_LABELS, MAX_CLASSES_WITH_CELLS = 20, 60, 200


def save_confusion_matrix(matrix: Any, labels: Sequence[str], path: Path) -> None:
    save_figure(draw_confusion_matrix(matrix, labels), path)


def draw_confusion_matrix(matrix: Any, labels: Sequence[str]) -> "Figure":
    """A confusion matrix (classes, classes): rows are true classes, columns predictions, as shares of the row.

    In a small matrix, classes that neither occur nor are predicted are omitted.
    """
    import numpy as np

    counts = np.asarray(matrix, dtype=np.int64)
    seen = np.flatnonzero(counts.sum(0) + counts.sum(1))
    if len(seen) > MAX_CLASSES_WITH_LABELS:
        seen = np.arange(len(counts))  # without labels, the axes show class numbers
    counts, classes = counts[np.ix_(seen, seen)], len(seen)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(max(4.5, 1.5 + 0.42 * classes), 13.0)
    figure = new_figure(max(side + 1.2, FIGURE_WIDTH), side, "compressed")

    from matplotlib.colors import Normalize, PowerNorm

    axes = figure.subplots()
    with_counts, unit = classes <= MAX_CLASSES_WITH_COUNTS, "share of the true class"
    scale = Normalize(0, 1) if with_counts else PowerNorm(0.5, vmin=0, vmax=1)  # shows a confusion of 2% without counts
    if classes <= MAX_CLASSES_WITH_CELLS:
        drawn = axes.imshow(shares, cmap=SHARE_MAP, norm=scale)
    else:  # cells would be smaller than a pixel: draw dots, the darkest last
        rows, columns = shares.nonzero()
        order = shares[rows, columns].argsort()
        rows, columns = rows[order], columns[order]
        drawn = axes.scatter(columns, rows, s=3, c=shares[rows, columns], cmap=SHARE_MAP, norm=scale, linewidths=0)
        axes.set(xlim=(0, classes), ylim=(classes, 0), aspect="equal")
    figure.colorbar(drawn, ax=axes, shrink=0.7, label=unit if with_counts else f"{unit} (colors by its square root)")
    style_axes(axes, f"{np.trace(counts):,} of {counts.sum():,} correct")
    axes.set_xlabel("Predicted class")
    axes.set_ylabel("True class")
    if classes <= MAX_CLASSES_WITH_LABELS:
        size = LABEL_POINTS if classes <= 30 else 7
        lines = 1 + (classes <= 30) + (classes <= 6)
        names = [wrap_label(labels[index], {1: 36, 2: 24, 3: 18}[lines], lines) for index in seen.tolist()]
        widest = max((measure_text(line, size) for name in names for line in name.split("\n")), default=0.0)
        upright = classes * (widest + 0.1) < side - 1
        axes.set_xticks(range(classes), names, rotation=0 if upright else 90, fontsize=size, parse_math=False)
        axes.set_yticks(range(classes), names, fontsize=size, parse_math=False)
    if with_counts:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{count}", ha="center", va="center", fontsize=NOTE_POINTS, color=color)
    return figure


def save_reliability_diagram(bins: Sequence[CalibrationBin], path: Path) -> None:
    save_figure(draw_reliability_diagram(bins), path)


def draw_reliability_diagram(bins: Sequence[CalibrationBin]) -> "Figure":
    """Accuracy over confidence, bin by bin, and the images per bin; a perfectly calibrated model is on the diagonal.

    Bins of few images are drawn lighter, and every bin has the 95% interval of its accuracy.
    """
    figure = new_figure(FIGURE_WIDTH, 4)
    left, right = figure.subplots(1, 2)
    images, error = sum(each.images for each in bins), 0.0
    gap_style: dict[str, Any] = {"facecolor": "none", "edgecolor": RED, "hatch": "////", "linewidth": 0.8}
    for each in bins:
        if each.accuracy is not None and each.confidence is not None:
            error += abs(each.accuracy - each.confidence) * each.images / images
            width, middle = each.high - each.low, (each.low + each.high) / 2
            low, high = sorted((each.accuracy, each.confidence))
            alpha = 0.85 * max(0.2, min(1.0, each.images / images / FULL_EVIDENCE))
            left.bar(each.low, each.accuracy, width, align="edge", color=BLUE, alpha=alpha, edgecolor="white")
            left.bar(each.low, high - low, width, bottom=low, align="edge", alpha=alpha, **gap_style)
            left.plot((middle, middle), each.accuracy_interval, color=SOFT, linewidth=1.2)
            right.bar(each.low, each.images / images * 100, width, align="edge", color=GRAY, edgecolor="white")
    (diagonal,) = left.plot((0, 1), (0, 1), "--", color=GRAY, linewidth=1)

    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    accuracy, gap = Patch(color=BLUE, alpha=0.85), Patch(**gap_style)
    interval = Line2D([], [], color=SOFT, linewidth=1.2)
    names = (
        f"accuracy (lighter: under {FULL_EVIDENCE:.0%} of images)",
        "its 95% interval",
        "gap to the mean confidence",
        "perfect calibration",
    )
    figure.legend(
        (accuracy, interval, gap, diagonal),
        names,
        loc="outside lower left",
        ncols=4,
        frameon=False,
        fontsize=NOTE_POINTS,
    )
    left.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    style_axes(left, f"accuracy by confidence: calibration error {error:.4f}")
    style_axes(right, f"{format_count(images, 'image')} by confidence")
    right.set(xlim=(0, 1), xlabel="confidence", ylabel="images (%)")
    return figure


def write_evaluation(result: Evaluation, report: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the report as JSON and the figures of an evaluation to a folder; many classes have no confusion matrix."""
    confusion, reliability, numbers = (out / name for name in EVALUATION_FILES)
    write_text(numbers, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    save_reliability_diagram(result.bins, reliability)
    if result.confusion is None:
        return [numbers, reliability]
    save_confusion_matrix(result.confusion, result.labels, confusion)
    return [numbers, reliability, confusion]
