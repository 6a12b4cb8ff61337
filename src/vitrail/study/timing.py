"""Time alternatives in interleaved rounds, so that load affects all and ratios stay fair; describe the machine."""

import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from time import perf_counter, sleep
from typing import Any

from vitrail import __version__
from vitrail.base.machine import describe_machine

TURN_SECONDS = 0.2  # of calls in a turn, at least one call
MIN_ROUNDS, MAX_ROUNDS = 3, 500
PROGRESS_PARTS = 100  # of one unit of work
PAUSE_SECONDS = 0.1  # before a turn: threads of the one before spin for a while, which would slow this one
PACKAGES = ("torch", "onnxruntime", "numpy", "timm", "transformers")  # whose versions are recorded

Progress = Callable[[int], object]  # called with the number of parts done since the last call


def collect_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "vitrail": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Environment:
    """Machine, versions of packages and time of a measurement."""

    machine: str = field(default_factory=describe_machine)
    versions: Mapping[str, str] = field(default_factory=collect_versions)
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"{self.machine}; {', '.join(f'{name} {number}' for name, number in self.versions.items())}"

    def to_json(self) -> dict[str, Any]:
        return {"vitrail": __version__, "when": self.when, "machine": self.machine, "versions": dict(self.versions)}


@dataclass(frozen=True)
class MedianAndQuartiles:
    """Median and quartiles of some values."""

    low: float
    median: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "MedianAndQuartiles":
        """Compute them; quartiles stay within the range of the values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class CallTimings:
    """Seconds of every call, round by round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def mean_seconds(self) -> list[float]:
        """Mean seconds per call, for each round."""
        return [statistics.fmean(calls) for calls in self.rounds]

    @property
    def calls(self) -> list[float]:
        return [call for calls in self.rounds for call in calls]

    def speedup_over(self, other: "CallTimings") -> MedianAndQuartiles:
        """Speed relative to `other`, as a ratio within each round."""
        return MedianAndQuartiles.from_values(
            [base / own for base, own in zip(other.mean_seconds, self.mean_seconds, strict=True)]
        )


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int | None = None,
    seconds: float = 3.0,
    warm: bool = True,
    seed: int = 0,
    progress: Callable[[float], object] | None = None,
) -> dict[str, CallTimings]:
    """Time every function in every round, in shuffled order, for `rounds` or about `seconds` per function.

    With `warm`, each is called twice at the start, and once before its turn, since the previous one has emptied the
    caches. `progress` is called with the share that is done.
    """
    calls, longest = dict.fromkeys(functions, 1), TURN_SECONDS
    if warm:
        for name, function in functions.items():
            function()
            once = max(time_call(function), 1e-6)
            calls[name], longest = max(1, min(1000, round(TURN_SECONDS / once))), max(longest, once)
    if rounds is None:
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, ceil(seconds / max(longest, 1e-6))))
    timings: dict[str, list[tuple[float, ...]]] = {name: [] for name in functions}
    order, shuffle = list(functions), random.Random(seed)
    for number in range(rounds):
        shuffle.shuffle(order)
        for index, name in enumerate(order, 1):
            sleep(PAUSE_SECONDS)
            if warm:
                functions[name]()
            timings[name].append(tuple(time_call(functions[name]) for _ in range(calls[name])))
            if progress is not None:
                progress((number + index / len(order)) / rounds)
    return {name: CallTimings(tuple(each)) for name, each in timings.items()}


def time_call(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


class FractionProgress:
    """Reports the share that is done to `progress`, in parts of PROGRESS_PARTS."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.reported = progress, 0

    def report(self, share: float) -> None:
        parts = int(PROGRESS_PARTS * share)
        if parts > self.reported:
            self.progress(parts - self.reported)
            self.reported = parts
