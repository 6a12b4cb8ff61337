"""Plots of training and evaluation: curves, confusion matrix, reliability diagram. Needs matplotlib."""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from vitrail.figures import BLUE, COLOURS, GREY, RED, new_figure, sanitize_label, save_figure, style_axes
from vitrail.files import write_text
from vitrail.train.metrics import CalibrationBin, Evaluation

EVALUATION_FILES = ("confusion.png", "reliability.png", "evaluation.json")
# the largest confusion matrix that shows them
MAX_CLASSES_WITH_COUNTS, MAX_CLASSES_WITH_LABELS, MAX_CLASSES_WITH_CELLS = 20, 60, 200


def plot_training_curves(runs: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Plot training loss and validation accuracy of each run over the epochs, side by side."""
    columns = min(len(runs), 4)
    figure = new_figure(11, 4 + 0.25 * ceil(len(runs) / 4))
    left, right = figure.subplots(1, 2)
    lines = list[Any]()
    for number, rows in enumerate(runs.values()):
        colour = COLOURS[number % len(COLOURS)]
        style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
        for axes, name, scale in ((left, "loss", 1), (right, "val_top1", 100)):
            points = [(row["epoch"], row[name] * scale) for row in rows if name in row and "epoch" in row]
            epochs, values = zip(*points, strict=True) if points else ((), ())
            marker = "o" if name == "val_top1" or len(points) == 1 else ""
            (line,) = axes.plot(epochs, values, style, color=colour, marker=marker, markersize=4, linewidth=1.6)
        lines.append(line)
    for axes, title in ((left, "training loss"), (right, "validation accuracy, %")):
        style_axes(axes, title)
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25, linewidth=0.6)
    legend = figure.legend(lines, ["" for _ in runs], loc="outside lower center", ncols=columns, frameon=False)
    for text, name in zip(legend.get_texts(), runs, strict=True):
        text.set(text=sanitize_label(name), parse_math=False)
    save_figure(figure, path)


def plot_confusion_matrix(matrix: Any, labels: Sequence[str], path: Path) -> None:
    """Plot a confusion matrix (classes, classes): rows are true classes, columns predictions, as shares of the row.

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
    figure = new_figure(side + 1.2, side)

    from matplotlib.colors import PowerNorm

    axes = figure.subplots()
    contrast = PowerNorm(0.4, vmin=0, vmax=1)  # makes a confusion of 2 % visible
    if classes <= MAX_CLASSES_WITH_CELLS:
        drawn = axes.imshow(shares, cmap="Blues", norm=contrast)
    else:  # cells would be smaller than a pixel: draw dots, the darkest last
        rows, columns = shares.nonzero()
        order = shares[rows, columns].argsort()
        rows, columns = rows[order], columns[order]
        drawn = axes.scatter(columns, rows, s=3, c=shares[rows, columns], cmap="Blues", norm=contrast, linewidths=0)
        axes.set(xlim=(0, classes), ylim=(classes, 0), aspect="equal")
    figure.colorbar(drawn, ax=axes, shrink=0.7, label="share of the class")
    style_axes(axes, f"{np.trace(counts):,} of {counts.sum():,} right")
    axes.set_xlabel("taken for")
    axes.set_ylabel("is")
    if classes <= MAX_CLASSES_WITH_LABELS:
        names, size = [sanitize_label(labels[index]) for index in seen.tolist()], 9 if classes <= 30 else 7
        axes.set_xticks(range(classes), names, rotation=90 if classes > 6 else 0, fontsize=size, parse_math=False)
        axes.set_yticks(range(classes), names, fontsize=size, parse_math=False)
    if classes <= MAX_CLASSES_WITH_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.3 else "black"
                axes.text(column, row, f"{count}", ha="center", va="center", fontsize=8, color=colour)
    save_figure(figure, path)


def plot_reliability_diagram(bins: Sequence[CalibrationBin], path: Path) -> None:
    """Plot accuracy over confidence, bin by bin; a perfectly calibrated model is on the diagonal."""
    figure = new_figure(5.2, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    images = sum(each.images for each in bins)
    error = 0.0
    for each in bins:
        if each.accuracy is not None and each.confidence is not None:
            error += abs(each.accuracy - each.confidence) * each.images / images
            width = each.high - each.low
            low, high = sorted((each.accuracy, each.confidence))
            upper.bar(each.low, each.accuracy, width, align="edge", color=BLUE, alpha=0.85, edgecolor="white")
            upper.bar(each.low, high - low, width, bottom=low, align="edge", color=RED, alpha=0.35, edgecolor=RED)
            lower.bar(each.low, each.images / images * 100, width, align="edge", color=GREY, edgecolor="white")
    upper.plot((0, 1), (0, 1), "--", color=GREY, linewidth=1)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    style_axes(upper, f"calibration error {error:.4f}")
    style_axes(lower, "")
    lower.set(xlabel="confidence", ylabel="% of images")
    save_figure(figure, path)


def write_evaluation(result: Evaluation, report: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the report as JSON and the figures of an evaluation to a folder; many classes have no confusion matrix."""
    confusion, reliability, numbers = (out / name for name in EVALUATION_FILES)
    write_text(numbers, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    plot_reliability_diagram(result.bins, reliability)
    if result.confusion is None:
        return [numbers, reliability]
    plot_confusion_matrix(result.confusion, result.labels, confusion)
    return [numbers, reliability, confusion]
