"""Metrics of an evaluation, accumulated batch by batch as sums, which can be added over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import DataError, VitrailError
from vitrail.base.table import Cell, Column, Shown, Table
from vitrail.base.text import format_count, make_printable
from vitrail.evaluation.wrong_predictions import WrongPrediction

CALIBRATION_BINS = 15  # for the calibration error, as in Guo 2017 (arXiv 1706.04599)
MAX_CLASSES_IN_CONFUSION = 4096  # a confusion matrix of this many classes takes 128 MB; larger ones are not computed
MAX_REPORT_ROWS = 10  # of classes, confused pairs and skipped files
MAX_NAME_LENGTH = 100  # characters of a class or file name in a report


@dataclass(frozen=True)
class ClassResult:
    index: int
    label: str
    images: int
    accuracy: float


@dataclass(frozen=True)
class ConfusedPair:
    label: str
    taken_for: str
    images: int


@dataclass(frozen=True)
class CalibrationBin:
    """Predictions of similar confidence, and how many of them are correct."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean; None for an empty bin
    accuracy: float | None

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy (Wilson 1927), which is wide for few images; 0 to 1 for none."""
        n, z, share = self.images, 1.96, self.accuracy or 0.0
        if not n:
            return 0.0, 1.0
        middle, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        low, high = ((middle + sign * spread) / (1 + z * z / n) for sign in (-1, 1))
        return max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of an evaluation; `str()` is its report. Accuracies are from 0 to 1."""

    images: int
    loss: float  # mean cross-entropy
    top1: float
    top5: float
    calibration_error: float  # mean of |confidence − accuracy| over the bins, weighted by images (ECE)
    real: float | None = None  # share of images with ReaL labels whose top class is one of them
    real_images: int = 0
    per_class: tuple[ClassResult, ...]  # only classes that occur in the data
    bins: tuple[CalibrationBin, ...]
    labels: tuple[str, ...]  # one per class of the model
    confusion: Tensor | None = field(repr=False)  # int64 (classes, classes): rows are true classes, columns predictions
    wrong: tuple[WrongPrediction, ...] = field(default=(), repr=False)  # the most confident first
    skipped: tuple[str, ...] = ()  # why images could not be read, one line each
    seconds: float = 0.0

    def list_confused_pairs(self) -> list[ConfusedPair]:
        """All confused pairs of classes, most frequent first."""
        if self.confusion is None:
            return []
        wrong = self.confusion.clone().fill_diagonal_(0)
        rows, columns = wrong.nonzero(as_tuple=True)
        counts = wrong[rows, columns]
        order = counts.argsort(descending=True, stable=True)
        found = zip(rows[order].tolist(), columns[order].tolist(), counts[order].tolist(), strict=True)
        return [ConfusedPair(self.labels[row], self.labels[column], count) for row, column, count in found]

    def to_json(self) -> dict[str, Any]:
        """Everything in plain values; confusion as a list of pairs, since a large matrix is mostly zeros."""
        return {
            "images": self.images,
            "loss": self.loss,
            "top1": self.top1,
            "top5": self.top5,
            "calibration_error": self.calibration_error,
            "real": self.real,
            "real_images": self.real_images,
            "seconds": self.seconds,
            "classes": [vars(each) for each in self.per_class],
            "confused": [vars(each) for each in self.list_confused_pairs()],
            "bins": [vars(each) for each in self.bins],
            "skipped": list(self.skipped),
        }

    def write(self, report: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write the report, the confusion matrix and the reliability diagram to a folder."""
        from vitrail.evaluation.plots import write_evaluation  # needs matplotlib

        return write_evaluation(self, report, folder)

    def __repr__(self) -> str:
        return f"Evaluation({self.format_headline()})"

    def __str__(self) -> str:
        return "\n\n".join(
            filter(
                None,
                (
                    self.format_headline(),
                    str(self.make_class_table()),
                    str(self.make_confused_table()) if self.list_confused_pairs() else "",
                    self.format_skipped(),
                ),
            )
        )

    @property
    def metrics(self) -> dict[str, float]:
        """What training logs."""
        return {"loss": self.loss, "top1": self.top1, "top5": self.top5}

    def format_headline(self) -> str:
        five = f", top-5 {self.top5:.2%}" if len(self.labels) > 5 else ""  # always 100% for five classes or fewer
        speed = f", {self.images / self.seconds:,.0f} images/s" if self.seconds else ""
        line = f"top-1 {self.top1:.2%}{five}, loss {self.loss:.4f}, calibration error {self.calibration_error:.4f}"
        line = f"{line}; {format_count(self.images, 'image')}{speed}"
        if self.real is None:
            return line
        return f"{line}\nReaL top-1 {self.real:.2%} of the {self.real_images:,} images that have ReaL labels"

    @property
    def table(self) -> Table:
        """One row with all metrics; top-5 only if there are more than five classes."""
        metrics: dict[Column, Cell] = {
            Column(name="images"): self.images,
            Column(name="top-1", unit="%", digits=2): self.top1,
            Column(name="top-5", unit="%", digits=2): self.top5 if len(self.labels) > 5 else None,
            Column(name="loss", digits=4): self.loss,
            Column(name="calibration error", digits=4): self.calibration_error,
            Column(name="ReaL top-1", unit="%", digits=2): self.real,
        }
        return Table(columns=tuple(metrics), rows=[list(metrics.values())]).drop_empty_columns()

    def make_class_table(self) -> Table:
        worst = sorted(self.per_class, key=lambda each: each.accuracy)
        some = len(worst) > 2 * MAX_REPORT_ROWS
        heading = f"worst of {len(worst):,} classes" if some else "class"
        return Table(
            columns=(Column(name=heading, max_length=MAX_NAME_LENGTH), Column(name="images"), Column(name="right")),
            rows=[
                (each.label, each.images, Shown(each.accuracy, f"{each.accuracy:.1%}"))
                for each in worst[: MAX_REPORT_ROWS if some else None]
            ],
        )

    def make_confused_table(self) -> Table:
        texts = (Column(name=name, max_length=MAX_NAME_LENGTH) for name in ("most confused", "taken for"))
        pairs = self.list_confused_pairs()[:MAX_REPORT_ROWS]
        rows = [(each.label, each.taken_for, each.images) for each in pairs]
        return Table(columns=(*texts, Column(name="images")), rows=rows)

    def format_skipped(self) -> str:
        if not self.skipped:
            return ""
        more = [f"and {len(self.skipped) - MAX_REPORT_ROWS:,} more"] if len(self.skipped) > MAX_REPORT_ROWS else []
        return "\n".join(
            [
                f"skipped, {len(self.skipped):,} unreadable:",
                *(make_printable(each, MAX_NAME_LENGTH) for each in self.skipped[:MAX_REPORT_ROWS]),
                *more,
            ]
        )


class MetricAccumulator:
    """Sums over all images so far, from which an Evaluation is computed."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        pairs = classes if classes <= MAX_CLASSES_IN_CONFUSION else 0
        shapes = ((6,), (3, CALIBRATION_BINS), (2, classes), (pairs, pairs))
        sizes = [prod(shape) for shape in shapes]
        self.sums = torch.zeros(sum(sizes), dtype=torch.float64)  # counts as well: exact up to 2^53
        views = (part.view(shape) for part, shape in zip(self.sums.split(sizes), shapes, strict=True))
        self.totals, self.bins, self.per_class, self.confusion = views  # views of `sums`
        self.wrong = list[Tensor]()  # rows of index, label, prediction and the probabilities of prediction and label

    def add_batch(
        self,
        logits: Tensor,
        labels: Tensor,
        real_labels: Sequence[tuple[int, ...] | None] | None = None,
        indices: Tensor | None = None,
    ) -> None:
        """Add logits (B, classes) and labels (B,); `real_labels` are the ReaL labels of each image, if known.

        With `indices`, the numbers of the images in their data set, wrong predictions are kept.
        """
        logits, labels = logits.detach().float().cpu().double(), labels.cpu()
        if not len(labels):
            return
        if not logits.isfinite().all():
            raise VitrailError(
                "the model returns NaN or infinity; expected finite logits: load the weights again, or in float32"
            )
        lowest, highest = labels.min().item(), labels.max().item()
        if lowest < 0 or highest >= self.classes:
            wrong = lowest if lowest < 0 else highest
            raise DataError(f"a label is {wrong}; expected 0 to {self.classes - 1}, the classes of the model")
        said, probabilities = logits.argmax(-1), logits.softmax(-1)
        confidence = probabilities.amax(-1)
        right = (said == labels).double()
        among = [
            guess in each for guess, each in zip(said.tolist(), real_labels or (), strict=bool(real_labels)) if each
        ]
        loss = F.cross_entropy(logits, labels, reduction="sum").item()
        five = (compute_label_ranks(logits, labels) < 5).sum().item()
        self.totals += torch.tensor([len(labels), loss, right.sum(), five, len(among), sum(among)], dtype=torch.float64)
        # bins include their upper end
        places = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
        self.bins.index_add_(1, places, torch.stack([torch.ones_like(right), right, confidence]))
        self.per_class.index_add_(1, labels, torch.stack([torch.ones_like(right), right]))
        if self.confusion.numel():
            self.confusion.index_put_((labels, said), torch.ones_like(right), accumulate=True)
        if indices is not None:
            of_label = probabilities.gather(1, labels[:, None])[:, 0]
            rows = torch.stack([indices.cpu().double(), labels.double(), said.double(), confidence, of_label], dim=1)
            self.wrong.append(rows[said != labels])

    def get_sums(self) -> Tensor:
        """All sums as one flat float64 tensor, to be added over ranks."""
        return self.sums.clone()

    def add_sums(self, sums: Tensor) -> None:
        self.sums += sums.cpu()

    def compute_evaluation(
        self,
        labels: Sequence[str],
        *,
        wrong: Sequence[WrongPrediction] = (),
        skipped: Sequence[str] = (),
        seconds: float = 0.0,
    ) -> Evaluation:
        """The metrics of all images so far; `labels` are the names of the model's classes."""
        images, loss, first, five, asked, among = self.totals.tolist()
        if not images:
            raise DataError(
                f"no images to evaluate; {len(skipped)} cannot be read, for instance {skipped[0]}"
                if skipped
                else "no images to evaluate; expected at least one"
            )
        _, right, confidence = self.bins
        per_class = [
            ClassResult(index, label, int(count), hits / count)
            for index, (label, count, hits) in enumerate(zip(labels, *self.per_class.tolist(), strict=True))
            if count
        ]
        return Evaluation(
            images=int(images),
            loss=loss / images,
            top1=first / images,
            top5=five / images,
            calibration_error=(right - confidence).abs().sum().item() / images,
            real=among / asked if asked else None,
            real_images=int(asked),
            per_class=tuple(per_class),
            bins=tuple(
                CalibrationBin(
                    n / CALIBRATION_BINS,
                    (n + 1) / CALIBRATION_BINS,
                    int(count),
                    *((sure / count, hits / count) if count else (None, None)),
                )
                for n, (count, hits, sure) in enumerate(self.bins.T.tolist())
            ),
            labels=tuple(labels),
            confusion=self.confusion.long() if self.confusion.numel() else None,
            wrong=tuple(wrong),
            skipped=tuple(skipped),
            seconds=seconds,
        )


def compute_label_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank of the true class among the logits; 0 is the top class. Ties are broken by class number."""
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(1)
