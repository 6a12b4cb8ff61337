"""Choose the number of CPU threads and the precision: measured at the start on a copy of the model, then fixed.

More threads are faster on an idle machine. Next to other busy processes, threads mostly wait for each other, and
fewer are faster. bfloat16 is up to twice as fast as float32 on a CPU with instructions for it, and several times as
slow on others, where it is not measured. About one second of training steps is enough for each decision.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch

from vitrail.base.errors import CheckpointError, ConfigError, VitrailError, describe_error
from vitrail.base.machine import MAX_THREADS, count_cores, find_bfloat16_instructions, restore_threads
from vitrail.base.text import format_count
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.recipes.recipe import PRECISIONS, Precision
from vitrail.tasks.task import CopyError
from vitrail.train.plan import Plan
from vitrail.train.throughput import start_trial
from vitrail.train.trainer import Trainer

SECONDS = 1.2  # total time of measured steps, if they are short
LONGEST = 10.0  # seconds after which no round is started: long steps need no averaging
BLOCK = 0.1  # minimum seconds of consecutive steps with the same number of threads
ROUNDS = 3  # minimum; a round has one block per number of threads
CLEAR = 1.3  # this many times as fast in every block: stop early
HOPELESS = 3.0  # this many times as slow as the best in the first round: not measured again
BFLOAT16_GAIN = 1.1  # bfloat16 must be this many times as fast, since it rounds more
GAIN = 1.02  # more threads must be this many times as fast, since they slow down other processes
FEWEST = 10  # steps; measuring takes about as many
FEW = 100  # steps; a run with fewer that also takes less than SHORT_RUN seconds is not worth measuring
SHORT_RUN = 10.0
SHORT = 1.0  # the same in minutes, for a run with a time budget

Way = TypeVar("Way")  # a number of threads, or a precision
Blocks = dict[Way, list[float]]  # seconds per step, one value per block


@dataclass(frozen=True)
class PrecisionChoice:
    precision: Precision
    reason: str = ""  # empty: there was nothing to choose

    def __str__(self) -> str:
        return f"precision {self.precision}: {self.reason}"


@dataclass(frozen=True)
class ThreadChoice:
    threads: int
    reason: str

    def __str__(self) -> str:
        return f"threads {self.threads}: {self.reason}"


def choose_speed(plan: Plan, asked: int | Literal["auto"] = "auto") -> tuple[Plan, list[str]]:
    """The plan with the fastest precision and number of threads, which torch uses from now on, and lines about both."""
    if asked != "auto":
        torch.set_num_threads(check_threads(asked))
    precision = choose_precision(plan)
    plan = replace(plan, precision=precision.precision)
    threads = choose_threads(plan, asked)
    return use_threads(plan, threads.threads), [str(threads), *([str(precision)] if precision.reason else [])]


def choose_precision(plan: Plan) -> PrecisionChoice:
    """The recipe's precision; if it is `auto`, the fastest one, as the first process measures it now."""
    asked, on_cpu = plan.recipe.loop.precision, plan.device.type == "cpu"
    if asked == "float16" and on_cpu:
        raise ConfigError(
            "`precision` is float16 on a CPU, which has no fast instructions for it; expected auto, bfloat16 or "
            "float32, or a GPU"
        )
    slow = is_slow_in_bfloat16(plan, asked)
    if asked != "auto" and not slow:
        return PrecisionChoice(asked)
    if not on_cpu:
        return PrecisionChoice("float32")
    measure = describe_slow_bfloat16 if slow else measure_precision
    found = measure(replace(plan, ranks=Ranks())) if plan.ranks.is_first else None
    return plan.ranks.broadcast_object(found)


def is_slow_in_bfloat16(plan: Plan, precision: str) -> bool:
    return precision == "bfloat16" and plan.device.type == "cpu" and not find_bfloat16_instructions()


def describe_slow_resume(plan: Plan) -> str:
    """A line about a run that stays in bfloat16, as it was started, on a CPU without instructions for it."""
    if not plan.ranks.is_first or not is_slow_in_bfloat16(plan, plan.chosen_precision):
        return ""
    return str(describe_slow_bfloat16(replace(plan, ranks=Ranks())))


def describe_slow_bfloat16(plan: Plan) -> PrecisionChoice:
    """bfloat16 as given, with its measured speed: this CPU has no instructions for it."""
    speed = "expect it to be slow"
    if not explain_no_measurement(plan):
        with suppress(Exception):  # the first step of the run reports it
            blocks = measure_step_seconds_by_precision(plan)
            speed = f"{median(blocks['float32']) / median(blocks['bfloat16']):.2g} × float32 here"
    return PrecisionChoice("bfloat16", f"as given, but this CPU has no instructions for it: {speed}")


def measure_precision(plan: Plan) -> PrecisionChoice:
    if not find_bfloat16_instructions():
        return PrecisionChoice("float32")
    try:
        if why := explain_no_measurement(plan):
            return PrecisionChoice("float32", why)
        blocks = measure_step_seconds_by_precision(plan)
    except CopyError as error:
        return PrecisionChoice("float32", f"not measured: {error}")
    except VitrailError:
        raise
    except Exception as error:  # a model from outside may do what bfloat16 does not support
        return PrecisionChoice("float32", f"bfloat16 failed: {describe_error(error)}")
    ratio = median(blocks["float32"]) / median(blocks["bfloat16"])
    if ratio < BFLOAT16_GAIN:
        return PrecisionChoice("float32", f"bfloat16 is {ratio:.2g} × as fast here")
    return PrecisionChoice("bfloat16", f"{ratio:.1f} × float32 here")


def choose_recorded_precision(plan: Plan, recorded: Mapping[str, Any], where: str) -> Plan:
    """The plan with the precision that the run was started in; float32 if this CPU has no instructions for bfloat16."""
    asked = plan.recipe.loop.precision
    found = recorded.get("precision", "float32") if asked == "auto" else asked
    if found not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise CheckpointError(f"{where} was trained in the precision {found!r}; expected one of {known}")
    lost = asked == "auto" and is_slow_in_bfloat16(plan, found)
    return replace(plan, precision=plan.ranks.broadcast_object("float32" if lost else found))


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
    try:
        if why := explain_no_measurement(plan):
            return ThreadChoice(most, why)
        blocks = measure_step_seconds_by_threads(plan, list_candidate_thread_counts(most))
    except CopyError as error:
        return ThreadChoice(most, f"not measured: {error}")
    per_step, unit = (loop.batch, "images") if plan.task.unit == "images" else (1, "steps")  # a batch may vary in size
    speeds = {threads: per_step / median(seconds) for threads, seconds in blocks.items()}
    best = choose_fewest_fast_threads(speeds)
    others = ", ".join(f"{each} thread{'s' * (each > 1)} {speeds[each]:,.4g}" for each in speeds if each != best)
    return ThreadChoice(best, f"{speeds[best]:,.4g} {unit}/s, {others}")


def explain_no_measurement(plan: Plan) -> str:
    """Why a run is not worth measuring; empty if it is."""
    loop = plan.recipe.loop
    if loop.compile:
        return "not measured, since the model would be compiled for each number"
    if loop.minutes is not None:
        return f"not measured for {loop.minutes:.2g} minutes" if loop.minutes < SHORT else ""
    return f"not measured for {format_count(plan.steps, 'step')}" if is_short_run(plan) else ""


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


def measure_step_seconds_by_threads(plan: Plan, numbers: Sequence[int]) -> Blocks[int]:
    """Seconds per step for each number of threads, in interleaved blocks; torch's number of threads is restored."""
    with restore_threads(), start_long_trial(plan) as (trainer, batches):

        def step(threads: int) -> None:
            torch.set_num_threads(threads)
            trainer.step(batches)

        return time_interleaved_steps(step, numbers)


def measure_step_seconds_by_precision(plan: Plan) -> Blocks[Precision]:
    """Seconds per step in float32 and in bfloat16, in interleaved blocks."""
    with start_long_trial(plan) as (trainer, batches):

        def step(precision: Precision) -> None:
            trainer.precision = precision
            trainer.step(batches)

        return time_interleaved_steps(step, ["float32", "bfloat16"])


@contextmanager
def start_long_trial(plan: Plan) -> Generator[tuple[Trainer, Iterator[Batch]]]:
    """A trial of the steps that take most of the time: with progressive resizing, those of large images."""
    with start_trial(plan) as (trainer, batches):
        if trainer.task.early_share:
            trainer.steps_done = trainer.steps - 1000
        yield trainer, batches


def is_short_run(plan: Plan) -> bool:
    """Whether training takes about as long as measuring."""
    return plan.steps < FEWEST or (plan.steps < FEW and measure_one_step(plan) * plan.steps < SHORT_RUN)


def measure_one_step(plan: Plan) -> float:
    """Seconds of the second step; the first fills caches."""
    with start_trial(plan) as (trainer, batches):
        return [time_steps(lambda _: trainer.step(batches), None, 1) for _ in range(2)][1]


def time_interleaved_steps(step: Callable[[Way], object], ways: Sequence[Way]) -> Blocks[Way]:
    """Seconds per step in each way; after one that is hopeless, the following ones are not tried."""
    blocks, begun = dict[Way, list[float]](), perf_counter()
    for way in ways:
        blocks[way] = [min(time_steps(step, way, 1) for _ in range(2))]  # the first step fills caches
        if blocks[way][0] > HOPELESS * find_shortest_step_seconds(blocks):
            break  # fewer threads would be even slower
    lengths = {
        way: max(1, ceil(BLOCK / seconds[0]))
        for way, seconds in blocks.items()
        if seconds[0] <= HOPELESS * find_shortest_step_seconds(blocks)
    }
    for done in count(1):
        spent = perf_counter() - begun
        if len(lengths) == 1 or has_clear_fastest_way(blocks) or spent > (SECONDS if done > ROUNDS else LONGEST):
            return blocks
        for way, steps in lengths.items():
            blocks[way].append(time_steps(step, way, steps))
    raise AssertionError("unreachable")


def time_steps(step: Callable[[Way], object], way: Way, steps: int) -> float:
    """Seconds per step."""
    start = perf_counter()
    for _ in range(steps):
        step(way)
    return (perf_counter() - start) / steps


def find_shortest_step_seconds(blocks: Blocks[Way]) -> float:
    return min(map(min, blocks.values()))


def has_clear_fastest_way(blocks: Blocks[Way]) -> bool:
    """Whether one is clearly the fastest in every block, after at least two blocks."""
    best = min(blocks, key=lambda way: median(blocks[way]))
    rest = [seconds for way, each in blocks.items() if way != best for seconds in each]
    return len(blocks[best]) > 1 and max(blocks[best]) * CLEAR < min(rest, default=float("inf"))
