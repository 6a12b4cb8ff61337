"""Ways to do the same thing, timed in turns: a busy moment of the machine hits all of them, and ratios stay fair."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, sleep

TURN = 0.2  # seconds of calls in a turn, at least one
LEAST, MOST = 3, 500  # rounds
PAUSE = 0.1  # seconds before a turn: threads of the one before spin for a while, and would slow this one


@dataclass(frozen=True)
class Spread:
    """The median of some numbers between their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Never outside of them, however few they are."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Timed:
    """Seconds of every call, round by round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> list[float]:
        """Seconds a call, of each round."""
        return [statistics.fmean(calls) for calls in self.rounds]

    @property
    def calls(self) -> list[float]:
        return [call for calls in self.rounds for call in calls]

    def times_as_fast_as(self, other: "Timed") -> Spread:
        """The ratio is taken within each round."""
        return Spread.of([theirs / own for theirs, own in zip(other.means, self.means, strict=True)])


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int | None = None,
    seconds: float = 3.0,
    warm: bool = True,
    seed: int = 0,
    progress: Callable[[float], object] | None = None,
) -> dict[str, Timed]:
    """Every way in every round, in shuffled order, for that many rounds or about so many seconds a way.

    With `warm`, a way is called twice before all, and once in each turn before its time is taken, since the one before
    has emptied the caches. `progress` is told which share is done.
    """
    calls, longest = dict.fromkeys(ways, 1), TURN
    if warm:
        for name, way in ways.items():
            way()
            once = max(seconds_of(way), 1e-6)
            calls[name], longest = max(1, min(1000, round(TURN / once))), max(longest, once)
    if rounds is None:
        rounds = max(LEAST, min(MOST, ceil(seconds / max(longest, 1e-6))))
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    order, shuffle = list(ways), random.Random(seed)
    for number in range(rounds):
        shuffle.shuffle(order)
        for place, name in enumerate(order, 1):
            sleep(PAUSE)
            if warm:
                ways[name]()
            found[name].append(tuple(seconds_of(ways[name]) for _ in range(calls[name])))
            if progress is not None:
                progress((number + place / len(order)) / rounds)
    return {name: Timed(tuple(each)) for name, each in found.items()}


def seconds_of(way: Callable[[], object]) -> float:
    start = perf_counter()
    way()
    return perf_counter() - start
