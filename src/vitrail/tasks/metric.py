"""Metrics of an evaluation: their names in the log, and how they are shown. Importing this never imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vitrail.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of an evaluation, and how it is shown."""

    name: str  # in the log with the prefix val_
    label: str  # in figures and tables
    higher_is_better: bool = True
    is_share: bool = False  # from 0 to 1, shown in per cent
    quantity: str = ""  # on the axis of figures; empty: the label

    def format_value(self, value: float | None) -> str:
        """A share in per cent, a loss with four decimals, others with four significant digits; empty for None."""
        if value is None:
            return ""
        return f"{value:{'.2%' if self.is_share else '.4f' if self.name == 'loss' else '.4g'}}"

    def choose_best(self, values: Sequence[float]) -> float | None:
        """The largest or the smallest value, by the direction of the metric; None without values."""
        return max(values, default=None) if self.higher_is_better else min(values, default=None)

    def count_since_best(self, values: Sequence[float]) -> int:
        """How many values follow the best one, the first of equal ones."""
        best = self.choose_best(values)
        return 0 if best is None else len(values) - 1 - list(values).index(best)


LOSS_METRIC = Metric(name="loss", label="loss", higher_is_better=False)
CLASSIFICATION_METRICS = (
    Metric(name="top1", label="top-1", is_share=True, quantity="accuracy"),
    LOSS_METRIC,
    Metric(name="top5", label="top-5", is_share=True, quantity="accuracy"),
)


def format_metrics(metrics: Sequence[Metric], values: Mapping[str, float]) -> list[str]:
    """The first metric of a task and the loss; if the loss is the first, the next three too; if neither, all values."""
    loss = next((each for each in metrics if each.name == "loss"), LOSS_METRIC)
    first = metrics[:4] if metrics and metrics[0].name == "loss" else metrics[:1]
    shown = {each.name: each for each in (*first, loss)}
    texts = [f"{each.label} {each.format_value(values[name])}" for name, each in shown.items() if name in values]
    return texts or [f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items()]


def check_evaluation_metrics(task: str, metrics: Sequence[Metric], values: Mapping[str, Any]) -> None:
    """Raise an error if an evaluation lacks the metric that counts, or if that is not a finite number."""
    name = metrics[0].name
    if name not in values:
        found = ", ".join(values) or "no metrics"
        raise ConfigError(f"the evaluation of {task} returned {found}; expected {name!r}, its first metric")
    if not isinstance(values[name], int | float) or not isfinite(values[name]):
        raise ConfigError(f"the metric {name!r} of {task} is {values[name]!r}; expected a finite number")
