"""Turn logits into the top classes by name. Needs only numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.checkpoint.class_mapping import split_label
from vitrail.errors import VitrailError
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.text import format_table


@dataclass(frozen=True)
class ClassProbability:
    index: int
    label: str | None
    probability: float

    @property
    def name(self) -> str:
        """The first name in the label, without its WordNet id; "class 3" without a label."""
        return next(iter(split_label(self.label or "")), f"class {self.index}")


@dataclass(frozen=True)
class Prediction:
    """The top classes of an image, the most probable first."""

    top: tuple[ClassProbability, ...]

    def __str__(self) -> str:
        lines = [(str(each.index), each.label or "", f"{each.probability:.4f}") for each in self.top]
        return "\n".join(format_table(("class", "label", "probability"), lines, "rlr"))


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """e^z / Σ e^z along the last axis; the maximum is subtracted first, so that nothing overflows."""
    with np.errstate(invalid="ignore", over="ignore"):  # the caller checks for infinite logits
        powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def predictions_from_logits(logits: NDArray[np.float32], labels: Sequence[str] | None, top: int) -> list[Prediction]:
    """The `top` classes of each image, ties in the order of the classes; logits are (B, classes)."""
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
