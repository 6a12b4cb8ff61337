"""From a model's numbers to the likeliest classes by name. Needs numpy and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.checkpoint.class_mapping import split_label
from vitrail.errors import ConfigError, VitrailError
from vitrail.text import format_table

NOT_FINITE_MESSAGE = "the model answers NaN; expected finite weights: load them again, or in float32"


@dataclass(frozen=True)
class ClassProbability:
    index: int
    label: str | None
    probability: float

    @property
    def name(self) -> str:
        """For people: the first of the names that a label lists, without WordNet's number; else the class's."""
        return next(iter(split_label(self.label or "")), f"class {self.index}")


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one picture, the likeliest first."""

    top: tuple[ClassProbability, ...]

    def __str__(self) -> str:
        lines = [(str(each.index), each.label or "", f"{each.probability:.4f}") for each in self.top]
        return "\n".join(format_table(("class", "label", "probability"), lines, "rlr"))


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """e^z / Σ e^z along the last axis, the largest subtracted first, so that nothing overflows."""
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite numbers, which the caller looks for
        powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def predictions_from_logits(logits: NDArray[np.float32], labels: Sequence[str] | None, top: int) -> list[Prediction]:
    """The `top` classes of each picture, of equal ones the first: (B, classes)."""
    probabilities = softmax(logits)
    if np.isnan(probabilities).any():
        raise VitrailError(NOT_FINITE_MESSAGE)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top]
    names: list[str | None] = [None] * logits.shape[-1] if labels is None else [*labels]
    rows = zip(order.tolist(), np.take_along_axis(probabilities, order, -1).tolist(), strict=True)
    return [
        Prediction(tuple(ClassProbability(n, names[n], share) for n, share in zip(indices, shares, strict=True)))
        for indices, shares in rows
    ]


def check_class_labels(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    given: Any = labels
    if isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"labels is {repr(labels)[:40]}; expected a list of texts")
    if len(labels) != classes:
        raise ConfigError(f"{len(labels)} labels for {classes} classes; expected one a class")
    return tuple(labels)
