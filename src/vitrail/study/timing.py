"""Ways to do the same thing, timed in turns: a busy moment of the machine hits all of them, and ratios stay fair."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, sleep

TURN_SECONDS = 0.2  # seconds of calls in a turn, at least one
MIN_ROUNDS, MAX_ROUNDS = 3, 500  # rounds
PAUSE_SECONDS = 0.1  # seconds before a turn: threads of the one before spin for a while, and would slow this one


@dataclass(frozen=True)
class MedianAndQuartiles:
    """The median of some numbers between their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "MedianAndQuartiles":
        """Never outside of them, however few they are."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class CallTimings:
    """Seconds of every call, round by round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def mean_seconds(self) -> list[float]:
        """Seconds a call, of each round."""
        return [statistics.fmean(calls) for calls in self.rounds]

    @property
    def calls(self) -> list[float]:
        return [call for calls in self.rounds for call in calls]

    def speedup_over(self, other: "CallTimings") -> MedianAndQuartiles:
        """The ratio is taken within each round."""
        return MedianAndQuartiles.from_values(
            [theirs / own for theirs, own in zip(other.mean_seconds, self.mean_seconds, strict=True)]
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
    """Every way in every round, in shuffled order, for that many rounds or about so many seconds a way.

    With `warm`, a way is called twice before all, and once in each turn before its time is taken, since the one before
    has emptied the caches. `progress` is told which share is done.
    """
    calls, longest = dict.fromkeys(functions, 1), TURN_SECONDS
    if warm:
        for name, way in functions.items():
            way()
            once = max(time_call(way), 1e-6)
            calls[name], longest = max(1, min(1000, round(TURN_SECONDS / once))), max(longest, once)
    if rounds is None:
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, ceil(seconds / max(longest, 1e-6))))
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in functions}
    order, shuffle = list(functions), random.Random(seed)
    for number in range(rounds):
        shuffle.shuffle(order)
        for place, name in enumerate(order, 1):
            sleep(PAUSE_SECONDS)
            if warm:
                functions[name]()
            found[name].append(tuple(time_call(functions[name]) for _ in range(calls[name])))
            if progress is not None:
                progress((number + place / len(order)) / rounds)
    return {name: CallTimings(tuple(each)) for name, each in found.items()}


def time_call(way: Callable[[], object]) -> float:
    start = perf_counter()
    way()
    return perf_counter() - start
