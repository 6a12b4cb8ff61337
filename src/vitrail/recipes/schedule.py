"""The clock of a run, and schedules: how the learning rate, or any other scalar, changes from step to step."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import cos, isfinite, pi, sqrt
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail.base.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.recipes.recipe import OptimizationSettings

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The progress of a run."""

    step: int  # steps done before this one
    steps: int  # of the run
    steps_per_epoch: int

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self.step // self.steps_per_epoch

    def in_steps(self, epochs: float) -> int:
        return round(epochs * self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A scalar that changes during a run: a linear warm-up to `start`, then on to `end` in the given shape.

    Of T steps after the warm-up, step t (from 0) has the value at t / T, so the last step is close to `end` but not at
    it. With `by` epoch, the value changes only at the start of each epoch.

    >>> from vitrail.recipes.schedule import Clock, Schedule
    >>> momentum = Schedule(start=0.996, end=1.0)
    >>> momentum.at(Clock(step=50, steps=100, steps_per_epoch=10))
    0.998
    """

    start: float
    end: float | None = None  # None: stays at `start`
    shape: Shape = "cosine"
    warmup: float = 0.0  # epochs
    warmup_start: float = 0.0
    by: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        numbers = {"start": self.start, "end": self.end, "warmup": self.warmup, "warmup_start": self.warmup_start}
        for name, value in numbers.items():
            is_number = type(value) in (int, float) and isfinite(value or 0)
            if not is_number and not (name == "end" and value is None):
                raise ConfigError(f"{name} of a schedule is {value!r}; expected a number")
        if self.warmup < 0:
            raise ConfigError(f"warmup of a schedule is {self.warmup}; expected epochs, 0 or more")
        if self.shape not in get_args(Shape):
            raise ConfigError(f"shape of a schedule is {self.shape!r}; expected one of {', '.join(get_args(Shape))}")
        if self.by not in ("step", "epoch"):
            raise ConfigError(f"by of a schedule is {self.by!r}; expected step or epoch")

    def at(self, clock: Clock) -> float:
        """The value for the step of the clock."""
        warmup = min(clock.in_steps(self.warmup), clock.steps)
        step = clock.epoch * clock.steps_per_epoch if self.by == "epoch" else clock.step
        if step < warmup:
            return self.warmup_start + (self.start - self.warmup_start) * step / warmup
        if self.end is None or self.shape == "constant":
            return self.start
        done = (step - warmup) / max(clock.steps - warmup, 1)  # from 0 to nearly 1
        left = (1 + cos(pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.end + (self.start - self.end) * left


def parse_if_numeric_text(value: Any) -> Any:
    """Convert text such as 1e-3, which YAML does not parse as a number."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) and value[:1] in "0123456789.-" else value
    return value


def parse_schedule(value: Any, name: str) -> Schedule:
    """A schedule from a recipe: a number, or a mapping such as {start: 0.996, end: 1, shape: cosine}."""
    if isinstance(value, Schedule):
        return value
    value = parse_if_numeric_text(value)
    if type(value) in (int, float):
        return Schedule(start=value)
    known = Schedule.__dataclass_fields__
    if not isinstance(value, Mapping) or "start" not in value or not all(each in known for each in value):
        raise ConfigError(f"the schedule of {name} is {value!r}; expected a number, or {', '.join(known)}")
    try:
        return Schedule(**{each: parse_if_numeric_text(given) for each, given in value.items()})
    except ConfigError as error:
        raise ConfigError(f"the schedule of {name}: {error}") from None


def format_setting(name: str, value: Any) -> str:
    """A setting for a report: 'weight_decay 0.04 to 0.4' if it has a schedule."""
    if not isinstance(value, Schedule) and not (isinstance(value, Mapping) and "start" in value):
        return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
    schedule = parse_schedule(value, name)
    return f"{name} {schedule.start}{'' if schedule.end is None else f' to {schedule.end}'}"


def lr_factor(step: int, steps: int, warmup: int, settings: "OptimizationSettings") -> float:
    """Learning rate of a step (from 0) as a share of the peak: linear warm-up, then the schedule."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)  # 0 at the peak, 1 at the end
    if settings.schedule == "cosine":
        return settings.final_lr + (1 - settings.final_lr) * (1 + cos(pi * done)) / 2
    if settings.schedule == "linear":
        return settings.final_lr + (1 - settings.final_lr) * (1 - done)
    if settings.schedule == "inverse_sqrt":  # Vaswani 2017: d^-0.5 · min(t^-0.5, t·w^-1.5), scaled to a peak of 1
        return sqrt(max(warmup, 1) / (step + 1))
    return 1.0
