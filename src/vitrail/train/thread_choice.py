"""How many threads a training computes on: measured at its start on a copy of the model, and fixed from then on.

More threads are faster on an idle machine. Next to other busy processes they wait for each other more than they
compute, and fewer are faster: which it is, a second of steps tells.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch

from vitrail.data.loader import report_dead_workers
from vitrail.errors import CheckpointError, ConfigError
from vitrail.machine import MAX_THREADS, count_cores
from vitrail.train.plan import Plan

SECONDS = 1.2  # of measured steps, if they are short
LONGEST = 10.0  # seconds, after which no round is begun: long steps tell enough by themselves
BLOCK = 0.1  # seconds of steps in a row with one number of threads, at least
ROUNDS = 3  # at least, each with a block for each number
CLEAR = 1.3  # times as fast in every block: no more rounds are needed
HOPELESS = 3.0  # times as slow as the best at first: not measured again
GAIN = 1.05  # times as fast must more threads be: they take the time of other processes
FEW = 100  # steps: in a shorter run the ten or so that are measured would take longer than they save
SHORT = 1.0  # minutes, for a run with a budget

Blocks = dict[int, list[float]]  # by the number of threads, seconds a step


@dataclass(frozen=True)
class ThreadChoice:
    threads: int
    reason: str

    def __str__(self) -> str:
        return f"threads {self.threads}: {self.reason}"


def choose_threads(plan: Plan, asked: int | Literal["auto"] = "auto") -> ThreadChoice:
    """The number asked for, or of 1 to torch's own number the one that trains fastest now."""
    most, loop = torch.get_num_threads(), plan.recipe.loop
    if asked != "auto":
        return ThreadChoice(check_threads(asked), "as given")
    if plan.device.type != "cpu":
        return ThreadChoice(most, f"torch's default, since the model is on {plan.device}")
    given = os.environ.get("OMP_NUM_THREADS")
    if plan.ranks.world_size > 1 and given in (None, "1"):  # torchrun sets 1, however many cores there are
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", plan.ranks.world_size))
        shared = max(1, count_cores() // processes)
        return ThreadChoice(shared, f"{count_cores()} cores for {processes} processes")
    if given is not None:
        return ThreadChoice(most, f"OMP_NUM_THREADS is {given}")
    if most == 1:
        return ThreadChoice(1, "torch may use one core")
    if loop.compile:
        return ThreadChoice(most, "not measured, since the model would be compiled for each number")
    if loop.minutes is None and plan.steps < FEW:
        return ThreadChoice(most, f"not measured for {plan.steps} steps")
    if loop.minutes is not None and loop.minutes < SHORT:
        return ThreadChoice(most, f"not measured for {loop.minutes:.2g} minutes")
    blocks = measure_threads(plan, list_candidates(most))
    speeds = {threads: loop.batch / median(seconds) for threads, seconds in blocks.items()}
    best = choose_fewest(speeds)
    others = ", ".join(f"{each} thread{'s' * (each > 1)} {speeds[each]:,.4g}" for each in speeds if each != best)
    return ThreadChoice(best, f"{speeds[best]:,.4g} images/s, {others}")


def get_recorded_threads(recorded: Mapping[str, Any], asked: int | Literal["auto"], where: str) -> int:
    """The number that a run began with; torch's own for a run from before it was recorded."""
    if asked != "auto":
        return check_threads(asked)
    threads = recorded.get("threads", torch.get_num_threads())
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise CheckpointError(f"{where} was trained on {threads!r} threads; expected a number from 1 to {MAX_THREADS}")
    return threads


def check_threads(threads: int) -> int:
    if not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads is {threads}; expected auto, or a number from 1 to {MAX_THREADS}")
    return threads


def list_candidates(most: int) -> list[int]:
    """All cores, all but one, and halves down to 1; the largest first."""
    found = {most, max(1, most - 1)}
    while most > 1:
        most //= 2
        found.add(most)
    return sorted(found, reverse=True)


def choose_fewest(speeds: Mapping[int, float]) -> int:
    """The fewest threads that are as fast as any, but for a few percent."""
    best = max(speeds.values())
    return min(threads for threads, speed in speeds.items() if speed * GAIN >= best)


def measure_threads(plan: Plan, numbers: Sequence[int]) -> Blocks:
    """Seconds a step by the number of threads, in blocks that take turns; nothing of it is left afterwards."""
    chance, before = torch.get_rng_state(), torch.get_num_threads()
    trainer = plan.with_model(deepcopy(plan.model)).create_trainer(10**6)
    if trainer.uses_early_size:  # images grow, and the large ones take most of the time
        trainer.steps_done = trainer.steps - 1000
    try:
        with report_dead_workers(plan.workers):
            batches = plan.load_batches(range(10**6))
            return time_interleaved_steps(lambda: trainer.step(batches), numbers)
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(chance)


def time_interleaved_steps(step: Callable[[], object], numbers: Sequence[int]) -> Blocks:
    blocks, begun = Blocks(), perf_counter()
    for threads in numbers:
        blocks[threads] = [min(time_steps(step, threads, 1) for _ in range(2))]  # the first step fills caches
        if blocks[threads][0] > HOPELESS * find_fastest(blocks):
            break  # fewer are slower still
    lengths = {
        threads: max(1, ceil(BLOCK / seconds[0]))
        for threads, seconds in blocks.items()
        if seconds[0] <= HOPELESS * find_fastest(blocks)
    }
    for done in count(1):
        spent = perf_counter() - begun
        if len(lengths) == 1 or is_clearly_fastest(blocks) or spent > (SECONDS if done > ROUNDS else LONGEST):
            return blocks
        for threads, steps in lengths.items():
            blocks[threads].append(time_steps(step, threads, steps))
    raise AssertionError("unreachable")


def time_steps(step: Callable[[], object], threads: int, steps: int) -> float:
    """Seconds a step."""
    torch.set_num_threads(threads)
    start = perf_counter()
    for _ in range(steps):
        step()
    return (perf_counter() - start) / steps


def find_fastest(blocks: Blocks) -> float:
    return min(map(min, blocks.values()))


def is_clearly_fastest(blocks: Blocks) -> bool:
    """Whether one number is far ahead in every block, of two at least."""
    best = min(blocks, key=lambda threads: median(blocks[threads]))
    rest = [seconds for threads, each in blocks.items() if threads != best for seconds in each]
    return len(blocks[best]) > 1 and max(blocks[best]) * CLEAR < min(rest, default=float("inf"))
