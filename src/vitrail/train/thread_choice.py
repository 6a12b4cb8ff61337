"""Choose the number of CPU threads: measured at the start on a copy of the model, then fixed for the run.

More threads are faster on an idle machine. Next to other busy processes, threads mostly wait for each other, and
fewer are faster. About one second of training steps is enough to decide.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.machine import MAX_THREADS, count_cores, restore_threads
from vitrail.base.text import format_count
from vitrail.tasks.task import CopyError
from vitrail.train.plan import Plan
from vitrail.train.throughput import start_trial

SECONDS = 1.2  # total time of measured steps, if they are short
LONGEST = 10.0  # seconds after which no round is started: long steps need no averaging
BLOCK = 0.1  # minimum seconds of consecutive steps with the same number of threads
ROUNDS = 3  # minimum; a round has one block per number of threads
CLEAR = 1.3  # this many times as fast in every block: stop early
HOPELESS = 3.0  # this many times as slow as the best in the first round: not measured again
GAIN = 1.02  # more threads must be this many times as fast, since they slow down other processes
FEWEST = 10  # steps; measuring takes about as many
FEW = 100  # steps; a run with fewer that also takes less than SHORT_RUN seconds is not worth measuring
SHORT_RUN = 10.0
SHORT = 1.0  # the same in minutes, for a run with a time budget

Blocks = dict[int, list[float]]  # number of threads → seconds per step, one value per block


@dataclass(frozen=True)
class ThreadChoice:
    threads: int
    reason: str

    def __str__(self) -> str:
        return f"threads {self.threads}: {self.reason}"


def choose_threads(plan: Plan, asked: int | Literal["auto"] = "auto") -> ThreadChoice:
    """The requested number, or the fastest one from 1 to torch's default, as measured now."""
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
    if loop.minutes is not None and loop.minutes < SHORT:
        return ThreadChoice(most, f"not measured for {loop.minutes:.2g} minutes")
    try:
        if loop.minutes is None and is_short_run(plan):
            return ThreadChoice(most, f"not measured for {format_count(plan.steps, 'step')}")
        blocks = measure_step_seconds_by_threads(plan, list_candidate_thread_counts(most))
    except CopyError as error:
        return ThreadChoice(most, f"not measured: {error}")
    per_step, unit = (loop.batch, "images") if plan.task.unit == "images" else (1, "steps")  # a batch may vary in size
    speeds = {threads: per_step / median(seconds) for threads, seconds in blocks.items()}
    best = choose_fewest_fast_threads(speeds)
    others = ", ".join(f"{each} thread{'s' * (each > 1)} {speeds[each]:,.4g}" for each in speeds if each != best)
    return ThreadChoice(best, f"{speeds[best]:,.4g} {unit}/s, {others}")


def use_threads(plan: Plan, threads: int) -> Plan:
    """Set torch's number of threads, and record it in the plan: sums depend on it."""
    torch.set_num_threads(threads)
    return replace(plan, threads=threads)


def choose_asked_or_recorded_threads(recorded: Mapping[str, Any], asked: int | Literal["auto"], where: str) -> int:
    """The number that a run was started with; torch's default for old runs, which did not record it."""
    if asked != "auto":
        return check_threads(asked)
    threads = recorded.get("threads", torch.get_num_threads())
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise CheckpointError(f"{where} was trained on {threads!r} threads; expected a number from 1 to {MAX_THREADS}")
    return threads


def check_threads(threads: int) -> int:
    if not 1 <= threads <= MAX_THREADS:
        raise ConfigError(
            f"`threads` is {threads}; expected a number from 1 to {MAX_THREADS}, or nothing to measure it"
        )
    return threads


def list_candidate_thread_counts(most: int) -> list[int]:
    """All cores, all but one, half, a quarter and so on down to 1; largest first."""
    found = {most, max(1, most - 1)}
    while most > 1:
        most //= 2
        found.add(most)
    return sorted(found, reverse=True)


def choose_fewest_fast_threads(speeds: Mapping[int, float]) -> int:
    """The smallest number of threads within a few percent of the fastest."""
    best = max(speeds.values())
    return min(threads for threads, speed in speeds.items() if speed * GAIN >= best)


def measure_step_seconds_by_threads(plan: Plan, numbers: Sequence[int]) -> Blocks:
    """Seconds per step for each number of threads, in interleaved blocks; torch's number of threads is restored."""
    with restore_threads(), start_trial(plan) as (trainer, batches):
        if trainer.task.early_share:  # with progressive resizing, the large images take most of the time
            trainer.steps_done = trainer.steps - 1000
        return time_interleaved_steps(lambda: trainer.step(batches), numbers)


def is_short_run(plan: Plan) -> bool:
    """Whether training takes about as long as measuring."""
    return plan.steps < FEWEST or (plan.steps < FEW and measure_one_step(plan) * plan.steps < SHORT_RUN)


def measure_one_step(plan: Plan) -> float:
    """Seconds of the second step; the first fills caches."""
    with start_trial(plan) as (trainer, batches):
        return [time_steps(lambda: trainer.step(batches), torch.get_num_threads(), 1) for _ in range(2)][1]


def time_interleaved_steps(step: Callable[[], object], numbers: Sequence[int]) -> Blocks:
    blocks, begun = Blocks(), perf_counter()
    for threads in numbers:
        blocks[threads] = [min(time_steps(step, threads, 1) for _ in range(2))]  # the first step fills caches
        if blocks[threads][0] > HOPELESS * find_shortest_step_seconds(blocks):
            break  # fewer would be even slower
    lengths = {
        threads: max(1, ceil(BLOCK / seconds[0]))
        for threads, seconds in blocks.items()
        if seconds[0] <= HOPELESS * find_shortest_step_seconds(blocks)
    }
    for done in count(1):
        spent = perf_counter() - begun
        if (
            len(lengths) == 1
            or has_clear_fastest_thread_count(blocks)
            or spent > (SECONDS if done > ROUNDS else LONGEST)
        ):
            return blocks
        for threads, steps in lengths.items():
            blocks[threads].append(time_steps(step, threads, steps))
    raise AssertionError("unreachable")


def time_steps(step: Callable[[], object], threads: int, steps: int) -> float:
    """Seconds per step."""
    torch.set_num_threads(threads)
    start = perf_counter()
    for _ in range(steps):
        step()
    return (perf_counter() - start) / steps


def find_shortest_step_seconds(blocks: Blocks) -> float:
    return min(map(min, blocks.values()))


def has_clear_fastest_thread_count(blocks: Blocks) -> bool:
    """Whether one number is clearly the fastest in every block, after at least two blocks."""
    best = min(blocks, key=lambda threads: median(blocks[threads]))
    rest = [seconds for threads, each in blocks.items() if threads != best for seconds in each]
    return len(blocks[best]) > 1 and max(blocks[best]) * CLEAR < min(rest, default=float("inf"))
