"""Turn logits into the top classes by name. Needs only numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import VitrailError
from vitrail.base.text import escape_unprintable, format_probability
from vitrail.data.images.class_names import split_label
from vitrail.export.agreement import NOT_FINITE_MESSAGE

BARS_STYLE = (
    "display: grid; grid-template-columns: max-content 14em max-content; gap: 2px 10px; align-items: center; "
    "justify-content: start; font-family: system-ui, sans-serif"
)


@dataclass(frozen=True)
class ClassProbability:
    """A class and its probability; `label` is None if the model has no class names."""

    index: int
    label: str | None
    probability: float

    @property
    def name(self) -> str:
        """The first name in the label, without its WordNet id; "class 3" without a label."""
        return next(iter(split_label(self.label or "")), f"class {self.index}")


@dataclass(frozen=True)
class Prediction:
    """The top classes of an image, the most probable first; `print` shows them as a table, a notebook as bars."""

    top: tuple[ClassProbability, ...]

    def __str__(self) -> str:
        return "\n".join(format_probabilities(self.top))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Bars next to the class names, for notebooks in a light or a dark theme."""
        from vitrail.base.style import BLUE

        rows = "".join(
            f'<span>{escape(escape_unprintable(each.name))}</span><span style="height: 0.9em; '
            f'width: {max(0.2, 100 * each.probability):.1f}%; background: {BLUE}"></span>'
            f'<span style="text-align: right">{escape(format_probability(each.probability))}</span>'
            for each in self.top
        )
        return f'<div style="{BARS_STYLE}">{rows}</div>'


def format_probabilities(top: Sequence[ClassProbability]) -> list[str]:
    """One line per class: its probability and its name."""
    numbers = [format_probability(each.probability) for each in top]
    width = max(map(len, numbers), default=0)
    return [f"{number:>{width}}  {escape_unprintable(each.name)}" for number, each in zip(numbers, top, strict=True)]


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
