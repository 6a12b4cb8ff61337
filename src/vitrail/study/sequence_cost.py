"""What a layer costs as the sequence grows: processor time and memory of ways to mix tokens, n by n."""

import ctypes
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, thread_time

import torch

from vitrail.errors import ConfigError
from vitrail.machine import restore_threads
from vitrail.study.sequence_cost_results import CostCell, CostResults
from vitrail.study.token_mixers import TOKEN_MIXERS, WINDOW_SIDE, MixerStep, TokenMixer

DEFAULT_TOKENS = tuple(side * side for side in (8, 16, 24, 32, 48, 64, 96, 128))  # 64 … 16,384
DEFAULT_WIDTH, DEFAULT_BUDGET = 64, 120.0
MAX_TOKENS = 256 * 256  # tokens
TURN_SECONDS = 0.03  # seconds of calls in a turn, one call at least
MIN_ROUNDS = 3  # rounds
MAX_TOKEN_COPIES = 16  # of the tokens, more than any has in memory at once
BUDGET_DIVISOR = 20  # one call may take the budget's 20th at most
PROGRESS_PARTS = 100  # that progress is told in

MEMINFO_FILE, STATUS_FILE, CLEAR_REFS_FILE = (
    Path("/proc/meminfo"),
    Path("/proc/self/status"),
    Path("/proc/self/clear_refs"),
)

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class CostRequest:
    tokens: Sequence[int] = DEFAULT_TOKENS  # squares of multiples of SIDE, for rows, columns and windows
    width: int = DEFAULT_WIDTH
    budget: float = DEFAULT_BUDGET  # seconds in all, about
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("no tokens; expected one length at least")
        for each in self.tokens:
            if not is_valid_length(each):
                raise ConfigError(
                    f"--tokens {each}; expected squares of multiples of {WINDOW_SIDE}, {MAX_TOKENS:,} at most, "
                    "so that axial and "
                    f"windowed attention have a grid; nearest: {' or '.join(map(str, find_valid_lengths(each)))}"
                )
        if not 1 <= self.width <= 1024:
            raise ConfigError(f"--width {self.width}; expected 1 to 1024")
        if not 0 < self.budget <= 86400:
            raise ConfigError(f"--budget {self.budget:g}; expected more than 0 seconds, and a day at most")


def is_valid_length(tokens: int) -> bool:
    return 0 < tokens <= MAX_TOKENS and math.isqrt(tokens) ** 2 == tokens and math.isqrt(tokens) % WINDOW_SIDE == 0


def find_valid_lengths(tokens: int) -> list[int]:
    """The lengths that fit below and above."""
    below = math.isqrt(max(0, tokens)) // WINDOW_SIDE
    found = dict.fromkeys((WINDOW_SIDE * each) ** 2 for each in (below, below + 1))
    return [each for each in found if is_valid_length(each)] or [MAX_TOKENS]


@dataclass
class MixerRun:
    """A way to mix so many tokens, and what is known of it so far."""

    mixer: TokenMixer
    tokens: int
    step: MixerStep
    call_seconds: float  # seconds of a call
    memory: int | None  # bytes
    seconds: list[float] = field(default_factory=list[float])  # of a call, round by round


def measure_sequence_cost(
    request: CostRequest, *, mixers: Sequence[TokenMixer] = TOKEN_MIXERS, progress: Progress = lambda _: None
) -> CostResults:
    """Measures every way at every length, in rounds, as many as the budget has room for and three at least.

    Time is the processor's, of one thread: what else runs on the machine takes none of it, and no thread waits for
    another. In a round every way at every length has its turn, in shuffled order. What would take too long or too much
    memory is left out, and named in the notes.
    """
    clock = BudgetClock(request.budget, progress)
    notes = list[str]()
    with restore_threads(), torch.inference_mode(), torch.random.fork_rng(devices=()):
        torch.set_num_threads(1)
        torch.manual_seed(request.seed)
        cells = list(prepare_mixer_runs(request, mixers, notes, clock))
        order, shuffle, longest, done = list(cells), random.Random(request.seed), 0.0, 0
        while done < MIN_ROUNDS or clock.seconds_left > longest:
            before = clock.seconds_left
            shuffle.shuffle(order)
            for cell in order:
                cell.seconds.append(time_turn(cell))
                clock.report_progress()
            longest, done = max(longest, before - clock.seconds_left), done + 1
    if not any(cell.memory for cell in cells):
        notes.append("memory is not measured: only Linux tells the peak of a part of a program")
    clock.finish_progress()
    found = [
        CostCell.from_seconds(each.seconds, mixer=each.mixer.name, tokens=each.tokens, memory=each.memory)
        for each in cells
    ]
    return CostResults.from_cells(
        found, mixers=mixers, width=request.width, rounds=done, notes=notes, seed=request.seed
    )


def prepare_mixer_runs(
    request: CostRequest, mixers: Sequence[TokenMixer], notes: list[str], clock: "BudgetClock"
) -> Iterator[MixerRun]:
    """Every way at every length that is within the budget, called before; short ones first, to foresee the long."""
    known = dict[str, tuple[int, float]]()
    left_out = dict[tuple[str, str], list[int]]()
    for tokens in sorted(set(request.tokens)):
        q, k, v = torch.randn(3, 1, 1, tokens, request.width).unbind()
        for mixer in mixers:
            before, seconds = known.get(mixer.name, (tokens, 0.0))
            if seconds * (tokens / before) ** mixer.time > request.budget / BUDGET_DIVISOR:
                reason = f"a call would take more than {request.budget / BUDGET_DIVISOR:g} s: give more --budget"
                left_out.setdefault((mixer.name, reason), []).append(tokens)
                continue
            if (
                needed := 4 * (mixer.scores * tokens**2 + MAX_TOKEN_COPIES * tokens * request.width)
            ) > read_available_bytes() / 2:
                reason = f"{needed / 1e9:.1f} GB is more than half of the memory that is free"
                left_out.setdefault((mixer.name, reason), []).append(tokens)
                continue
            step = mixer.build(q, k, v)
            step.run()
            once, memory = measure_call(step)
            known[mixer.name] = tokens, once
            yield MixerRun(mixer, tokens, step, once, memory)
            clock.report_progress()
    for (name, reason), lengths in left_out.items():
        notes.append(f"{name} is left out at {', '.join(f'{each:,}' for each in lengths)} tokens: {reason}")


def time_turn(cell: MixerRun) -> float:
    """Of a call, in the mean of a turn; a short one is called once before, since others have emptied the caches."""
    calls = max(1, min(1000, round(TURN_SECONDS / cell.call_seconds)))
    if calls > 1:
        cell.step.run()
    begun = thread_time()
    for _ in range(calls):
        cell.step.run()
    return (thread_time() - begun) / calls


def measure_call(step: MixerStep) -> tuple[float, int | None]:
    """Seconds of a call, and bytes: of all that it reads, and the most that the process grows by meanwhile.

    It counts whatever the libraries under torch take for themselves, which torch does not see; not what they kept from
    a call before.
    """
    before = read_resident_bytes("VmRSS") if reset_peak_memory() else None
    begun = thread_time()
    step.run()
    seconds = max(thread_time() - begun, 1e-9)
    return seconds, None if before is None else step.input_bytes + max(0, read_resident_bytes("VmHWM") - before)


def reset_peak_memory() -> bool:
    """Memory that was freed goes back, so that all that is needed next is new, and the peak so far is forgotten.

    Linux keeps the largest resident set of a process, and begins anew when 5 is written there. False: not this system.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS_FILE.write_text("5", "ascii")
    except (OSError, AttributeError, TypeError):
        return False
    return True


def read_resident_bytes(name: str) -> int:
    """VmRSS: now; VmHWM: the most so far."""
    return read_proc_number(STATUS_FILE, name) * 1024


def read_available_bytes() -> float:
    return read_proc_number(MEMINFO_FILE, "MemAvailable") * 1024 if MEMINFO_FILE.exists() else math.inf


def read_proc_number(path: Path, name: str) -> int:
    line = next(line for line in path.read_text("utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


class BudgetClock:
    """How much of the budget is left, and progress in shares of it."""

    def __init__(self, budget: float, progress: Progress) -> None:
        self.budget, self.progress, self.reported_parts, self.start_time = budget, progress, 0, perf_counter()

    @property
    def seconds_left(self) -> float:
        return self.budget - (perf_counter() - self.start_time)

    def report_progress(self) -> None:
        self.report_up_to(min(PROGRESS_PARTS - 1, int(PROGRESS_PARTS * (1 - self.seconds_left / self.budget))))

    def finish_progress(self) -> None:
        self.report_up_to(PROGRESS_PARTS)

    def report_up_to(self, parts: int) -> None:
        if parts > self.reported_parts:
            self.progress(parts - self.reported_parts)
            self.reported_parts = parts
