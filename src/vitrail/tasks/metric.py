"""Metrics of an evaluation: their names in the log, how they are shown, and signs of collapse, that features no longer
depend on the image. Importing this never imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from vitrail.base.errors import ConfigError, VitrailError, VitrailWarning


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


COLLAPSED = "collapsed"  # in the record of the log that shows it
COLLAPSE_WINDOWS = 3  # log windows in a row that must show a sign, by default


@dataclass(frozen=True, kw_only=True)
class CollapseSign:
    """A metric of `forward` whose value, in several log windows in a row after the warm-up, means a collapse."""

    metric: str
    below: float | None = None
    above: float | None = None
    meaning: str  # completes: "the run has collapsed: …"
    remedy: str  # an imperative
    windows: int = COLLAPSE_WINDOWS
    steps: int = 0  # that these windows must cover at least; those of a short run may have one step each

    def is_shown_by(self, record: Mapping[str, float]) -> bool:
        value = record.get(self.metric)
        if value is None:
            return False
        return (self.below is not None and value < self.below) or (self.above is not None and value > self.above)

    def describe_limit(self) -> str:
        return f"less than {self.below:g}" if self.below is not None else f"more than {self.above:g}"


@dataclass
class CollapseWatch:
    """Counts the log windows that show each sign. A collapse is reported once."""

    signs: Sequence[CollapseSign] = ()
    warmup_steps: int = 0  # windows that end in it are ignored
    reported: bool = False
    counts: dict[str, int] = field(default_factory=dict[str, int])
    starts: dict[str, float] = field(default_factory=dict[str, float])  # the step before the first of these windows
    last_step: float = 0

    def find_collapse(self, record: Mapping[str, float]) -> str | None:
        """A one-line report if this record of the log is the one that shows a collapse."""
        if "loss" not in record:
            return None
        before, self.last_step = self.last_step, record["step"]
        if record["step"] <= self.warmup_steps:
            return None
        for sign in self.signs:
            key = f"{sign.metric} {sign.describe_limit()}"
            self.counts[key] = self.counts.get(key, 0) + 1 if sign.is_shown_by(record) else 0
            if self.counts[key] == 1:
                self.starts[key] = before
            if (
                self.counts[key] >= sign.windows
                and record["step"] - self.starts[key] >= sign.steps
                and not self.reported
            ):
                self.reported = True
                return (
                    f"the run has collapsed at step {record['step']:.0f}: {sign.metric.replace('_', ' ')} is "
                    f"{record[sign.metric]:.4g}, {sign.describe_limit()} in {self.counts[key]} log windows: "
                    f"{sign.meaning}; {sign.remedy}"
                )
        return None


class CollapsedError(VitrailError):
    """The features collapsed, and `stop_on_collapse` is set."""


class CollapseWarning(VitrailWarning):
    """The features collapsed; training continues."""


SPREAD_SIGN = CollapseSign(
    metric="spread",
    below=0.05,
    meaning="all images have nearly the same features",
    remedy="lower `lr`, use a larger `batch`, or a longer `warmup`",
)
