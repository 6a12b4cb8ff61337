"""Cost of token mixers by sequence length: CPU time and memory."""

import ctypes
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, thread_time

import torch

from vitrail.base.errors import ConfigError
from vitrail.base.machine import read_proc_kilobytes, read_resident_bytes, restore_threads
from vitrail.study.sequence_cost_results import CostCell, CostResults
from vitrail.study.timing import FractionProgress, Progress
from vitrail.study.token_mixers import TOKEN_MIXERS, WINDOW_SIDE, MixerStep, TokenMixer

DEFAULT_TOKENS = tuple(side * side for side in (8, 16, 24, 32, 48, 64, 96, 128))  # 64 … 16,384
DEFAULT_WIDTH, DEFAULT_BUDGET = 64, 120.0
MAX_TOKENS = 256 * 256
TURN_SECONDS = 0.03  # of calls in a turn, at least one call
MIN_ROUNDS = 3
MAX_TOKEN_COPIES = 16  # upper bound of the copies of all tokens that a mixer needs at once
BUDGET_DIVISOR = 20  # one call may take 1/20 of the budget
MEMINFO_FILE, CLEAR_REFS_FILE = Path("/proc/meminfo"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class CostRequest:
    tokens: Sequence[int] = DEFAULT_TOKENS  # squares of multiples of WINDOW_SIDE
    width: int = DEFAULT_WIDTH
    budget: float = DEFAULT_BUDGET  # total seconds, approximately
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("no sequence lengths were given; expected at least one")
        for each in self.tokens:
            if not is_valid_length(each):
                raise ConfigError(
                    f"`tokens` is {each}; expected squares of multiples of {WINDOW_SIDE} up to {MAX_TOKENS:,}, which "
                    "axial and windowed attention need; "
                    f"nearest: {' or '.join(map(str, find_nearest_valid_lengths(each)))}"
                )
        if not 1 <= self.width <= 1024:
            raise ConfigError(f"`width` is {self.width}; expected 1 to 1024")
        if not 0 < self.budget <= 86400:
            raise ConfigError(f"`budget` is {self.budget:g} seconds; expected more than 0 and at most 86400")


def is_valid_length(tokens: int) -> bool:
    return 0 < tokens <= MAX_TOKENS and math.isqrt(tokens) ** 2 == tokens and math.isqrt(tokens) % WINDOW_SIDE == 0


def find_nearest_valid_lengths(tokens: int) -> list[int]:
    """The nearest valid lengths below and above."""
    below = math.isqrt(max(0, tokens)) // WINDOW_SIDE
    lengths = dict.fromkeys((WINDOW_SIDE * each) ** 2 for each in (below, below + 1))
    return [each for each in lengths if is_valid_length(each)] or [MAX_TOKENS]


@dataclass
class MixerRun:
    """A token mixer at one sequence length, and its measurements so far."""

    mixer: TokenMixer
    tokens: int
    step: MixerStep
    call_seconds: float  # of the first measured call
    memory: int | None  # bytes
    seconds: list[float] = field(default_factory=list[float])  # per call, one value per round


def measure_sequence_cost(
    request: CostRequest, *, mixers: Sequence[TokenMixer] = TOKEN_MIXERS, progress: Progress = lambda _: None
) -> CostResults:
    """Measure every mixer at every length in as many rounds as the budget allows, at least three.

    Time is CPU time of one thread, which other processes do not affect. Each round measures every mixer at every length
    in shuffled order. What would take too long or too much memory is left out and listed in the notes.
    """
    clock = BudgetClock(request.budget, progress)
    notes = list[str]()
    with restore_threads(), torch.inference_mode(), torch.random.fork_rng(devices=()):
        torch.set_num_threads(1)
        torch.manual_seed(request.seed)
        runs = list(prepare_mixer_runs(request, mixers, notes, clock))
        order, shuffle, longest, rounds = list(runs), random.Random(request.seed), 0.0, 0
        while rounds < MIN_ROUNDS or clock.seconds_left > longest:
            before = clock.seconds_left
            shuffle.shuffle(order)
            for run in order:
                run.seconds.append(measure_mean_call_seconds(run))
                clock.report_progress()
            longest, rounds = max(longest, before - clock.seconds_left), rounds + 1
    if not any(run.memory for run in runs):
        notes.append("memory is not measured: only Linux can reset the peak of a process")
    clock.finish()
    cells = [
        CostCell.from_seconds(each.seconds, mixer=each.mixer.name, tokens=each.tokens, memory=each.memory)
        for each in runs
    ]
    return CostResults(
        cells=tuple(cells),
        mixers=tuple(mixers),
        width=request.width,
        rounds=rounds,
        notes=tuple(notes),
        seed=request.seed,
    )


def prepare_mixer_runs(
    request: CostRequest, mixers: Sequence[TokenMixer], notes: list[str], clock: "BudgetClock"
) -> Iterator[MixerRun]:
    """Build and warm up every mixer at every length within the budget; short ones first, to predict long ones."""
    last_seconds = dict[str, tuple[int, float]]()
    left_out = dict[tuple[str, str], list[int]]()
    for tokens in sorted(set(request.tokens)):
        q, k, v = torch.randn(3, 1, 1, tokens, request.width).unbind()
        for mixer in mixers:
            before, seconds = last_seconds.get(mixer.name, (tokens, 0.0))
            if seconds * (tokens / before) ** mixer.time > request.budget / BUDGET_DIVISOR:
                reason = f"a call would take more than {request.budget / BUDGET_DIVISOR:g} s; increase the budget"
                left_out.setdefault((mixer.name, reason), []).append(tokens)
                continue
            if (
                needed := 4 * (mixer.scores * tokens**2 + MAX_TOKEN_COPIES * tokens * request.width)
            ) > read_available_bytes() / 2:
                reason = f"{needed / 1e9:.1f} GB is more than half of the available memory"
                left_out.setdefault((mixer.name, reason), []).append(tokens)
                continue
            step = mixer.build(q, k, v)
            step.run()
            once, memory = measure_call_seconds_and_bytes(step)
            last_seconds[mixer.name] = tokens, once
            yield MixerRun(mixer, tokens, step, once, memory)
            clock.report_progress()
    for (name, reason), lengths in left_out.items():
        notes.append(f"{name} is left out at {', '.join(f'{each:,}' for each in lengths)} tokens: {reason}")


def measure_mean_call_seconds(run: MixerRun) -> float:
    """Mean seconds per call in a turn; a short call is warmed up once, since others have emptied the caches."""
    calls = max(1, min(1000, round(TURN_SECONDS / run.call_seconds)))
    if calls > 1:
        run.step.run()
    start = thread_time()
    for _ in range(calls):
        run.step.run()
    return (thread_time() - start) / calls


def measure_call_seconds_and_bytes(step: MixerStep) -> tuple[float, int | None]:
    """Seconds of a call, and bytes: its inputs plus the growth of the process at its peak.

    This includes memory of libraries below torch, which torch does not count, but not what they keep between calls.
    """
    before = read_resident_bytes("VmRSS") if reset_peak_memory() else None
    start = thread_time()
    step.run()
    seconds = max(thread_time() - start, 1e-9)
    return seconds, None if before is None else step.input_bytes + max(0, read_resident_bytes("VmHWM") - before)


def reset_peak_memory() -> bool:
    """Return freed memory to the system, so that the next call must allocate, and reset the peak; False if unsupported.

    Linux resets the peak resident set of a process when 5 is written to clear_refs.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS_FILE.write_text("5", "ascii")
    except (OSError, AttributeError, TypeError):
        return False
    return True


def read_available_bytes() -> float:
    return read_proc_kilobytes(MEMINFO_FILE, "MemAvailable") * 1024 if MEMINFO_FILE.exists() else math.inf


class BudgetClock:
    """The remaining budget, reported as progress."""

    def __init__(self, budget: float, progress: Progress) -> None:
        self.budget, self.progress, self.start_time = budget, FractionProgress(progress), perf_counter()

    @property
    def seconds_left(self) -> float:
        return self.budget - (perf_counter() - self.start_time)

    def report_progress(self) -> None:
        self.progress.report(min(0.999, 1 - self.seconds_left / self.budget))

    def finish(self) -> None:
        self.progress.report(1)
