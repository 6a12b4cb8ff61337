"""Collapse: signs in the metrics of a run that its features no longer depend on the image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vitrail.base.errors import VitrailError, VitrailWarning

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
