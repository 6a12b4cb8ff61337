"""Cost of token mixers by sequence length: CPU time and memory, and their exponents compared with theory."""

import ctypes
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.files import write_json, write_text
from vitrail.base.machine import read_proc_kilobytes, read_resident_bytes, restore_threads
from vitrail.base.style import NOTE_POINTS, PALETTE
from vitrail.base.table import Cell, Column, Shown, Table
from vitrail.layers.attention import attention
from vitrail.study.timing import Environment, FractionProgress, MedianAndQuartiles, Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW_SIDE = 8  # tokens
KEYS_PER_QUERY = WINDOW_SIDE * WINDOW_SIDE  # in a window (r), and after Linformer's projection (k)
KERNEL_SIZE = 3  # of the convolution, in tokens


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v with all n² scores in memory."""
    return (q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)).softmax(-1) @ v


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, k_map: Tensor, v_map: Tensor) -> Tensor:
    """Attention to k mixtures of all n keys and values, by maps (n, k) (Wang 2020, arXiv 2006.04768)."""
    return attention(q, k_map.T @ k, v_map.T @ v)


def axial_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention along rows, then columns of a square grid: (1, 1, n, d) → (1, 1, n, d) (Ho 2019, arXiv 1912.12180)."""
    q, k, v = (x.unflatten(2, find_square_grid_shape(x)).transpose(1, 2)[0] for x in (q, k, v))  # (rows, 1, columns, d)
    rows = attention(q, k, v)
    columns = attention(q.transpose(0, 2), k.transpose(0, 2), rows.transpose(0, 2))  # (columns, 1, rows, d)
    return columns.transpose(0, 2).reshape(1, 1, -1, columns.shape[-1])


def windowed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within square windows of WINDOW_SIDE tokens on a square grid: (1, 1, n, d) → (1, 1, n, d)."""
    rows, columns = find_square_grid_shape(q)
    cut = (rows // WINDOW_SIDE, WINDOW_SIDE, columns // WINDOW_SIDE, WINDOW_SIDE)
    q, k, v = (x.unflatten(2, cut).transpose(3, 4).reshape(-1, 1, KEYS_PER_QUERY, x.shape[-1]) for x in (q, k, v))
    out = attention(q, k, v).reshape(1, 1, cut[0], cut[2], WINDOW_SIDE, WINDOW_SIDE, -1)
    return out.transpose(3, 4).flatten(2, 5)


def find_square_grid_shape(x: Tensor) -> tuple[int, int]:
    side = math.isqrt(x.shape[2])
    return side, side


@dataclass(frozen=True)
class MixerStep:
    """A repeatable call, and all tensors that it reads."""

    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]

    @property
    def input_bytes(self) -> int:
        return sum(each.nbytes for each in self.inputs)


def make_qkv_step_builder(
    mix: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], MixerStep]:
    return lambda q, k, v: MixerStep(lambda: mix(q, k, v), (q, k, v))


def build_linformer_step(q: Tensor, k: Tensor, v: Tensor) -> MixerStep:
    tokens = q.shape[2]
    k_map, v_map = torch.randn(2, tokens, min(KEYS_PER_QUERY, tokens)).div(math.sqrt(tokens)).unbind()
    return MixerStep(lambda: linformer_attention(q, k, v, k_map, v_map), (q, k, v, k_map, v_map))


def build_lstm_step(q: Tensor, _: Tensor, __: Tensor) -> MixerStep:
    layer = nn.LSTM(q.shape[-1], q.shape[-1], batch_first=True).requires_grad_(False).eval()
    return MixerStep(lambda: layer(q[0])[0], (q, *layer.parameters()))


def build_convolution_step(q: Tensor, _: Tensor, __: Tensor) -> MixerStep:
    layer = nn.Conv1d(q.shape[-1], q.shape[-1], KERNEL_SIZE, padding="same").requires_grad_(False).eval()
    x = q[0].transpose(1, 2).contiguous()  # (1, d, n)
    return MixerStep(lambda: layer(x), (x, *layer.parameters()))


@dataclass(frozen=True)
class TokenMixer:
    """A token mixer. Operations, sequential steps and maximum path length are as in table 1 of Vaswani 2017."""

    name: str
    build: Callable[[Tensor, Tensor, Tensor], MixerStep]
    operations: str
    steps: str
    path: str
    time: float  # exponent of n in theory
    memory: float
    scores: int = 0  # arrays of n² values in memory at once
    vaswani: bool = True  # whether it is in that table


TOKEN_MIXERS = (
    TokenMixer("full, fused", make_qkv_step_builder(attention), "n²·d", "1", "1", time=2, memory=1),
    TokenMixer(
        "full, explicit", make_qkv_step_builder(explicit_attention), "n²·d", "1", "1", time=2, memory=2, scores=2
    ),
    TokenMixer("Linformer", build_linformer_step, "k·n·d", "1", "1", time=1, memory=1, vaswani=False),
    TokenMixer("axial", make_qkv_step_builder(axial_attention), "n·√n·d", "1", "1", time=1.5, memory=1, vaswani=False),
    TokenMixer("windowed", make_qkv_step_builder(windowed_attention), "r·n·d", "1", "n/r", time=1, memory=1),
    TokenMixer("LSTM", build_lstm_step, "n·d²", "n", "n", time=1, memory=1),
    TokenMixer("convolution", build_convolution_step, "k·n·d²", "1", "log_k n", time=1, memory=1),
)


DEFAULT_TOKENS = tuple(side * side for side in (8, 16, 24, 32, 48, 64, 96, 128))  # 64 … 16,384
DEFAULT_WIDTH, DEFAULT_BUDGET = 64, 120.0
MAX_TOKENS = 256 * 256
TURN_SECONDS = 0.03  # of calls in a turn, at least one call
MIN_ROUNDS = 3
MAX_TOKEN_COPIES = 16  # upper bound of the copies of all tokens that a mixer needs at once
BUDGET_DIVISOR = 20  # one call may take 1/20 of the budget
FIT_FROM_TOKENS = 1024  # exponents are fitted from here, where the work exceeds the overhead of a call
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


@dataclass(frozen=True, kw_only=True)
class CostCell:
    """Measurements of one token mixer at one sequence length."""

    mixer: str
    tokens: int
    seconds: MedianAndQuartiles  # per call, over the rounds
    rounds: tuple[float, ...]  # seconds per call in each round
    memory: int | None  # bytes

    @classmethod
    def from_seconds(cls, seconds: Sequence[float], **about: Any) -> "CostCell":
        return cls(seconds=MedianAndQuartiles.from_values(seconds), rounds=tuple(seconds), **about)


def fit_exponent(points: Mapping[int, float]) -> float | None:
    """p of cost ∝ n^p: least-squares slope of log cost over log n, from FIT_FROM_TOKENS on."""
    logs = {math.log(n): math.log(cost) for n, cost in points.items() if n >= FIT_FROM_TOKENS and cost > 0}
    return linear_regression(list(logs), list(logs.values())).slope if len(logs) > 1 else None


@dataclass(frozen=True, kw_only=True)
class CostResults:
    cells: tuple[CostCell, ...]
    mixers: tuple[TokenMixer, ...]
    width: int
    rounds: int
    notes: tuple[str, ...] = ()  # what was left out, and why
    seed: int = 0
    environment: Environment = field(default_factory=Environment)

    @property
    def tokens(self) -> list[int]:
        return sorted({cell.tokens for cell in self.cells})

    def select_cells(self, name: str) -> list[CostCell]:
        return [cell for cell in self.cells if cell.mixer == name]

    def fit_time_exponent(self, name: str) -> MedianAndQuartiles | None:
        """Median and quartiles of the exponents fitted in each round, whose cells were measured close in time."""
        cells = self.select_cells(name)
        fits = [fit_exponent({cell.tokens: cell.rounds[n] for cell in cells}) for n in range(self.rounds)]
        exponents = [each for each in fits if each is not None]
        return MedianAndQuartiles.from_values(exponents) if exponents else None

    def fit_memory_exponent(self, name: str) -> float | None:
        return fit_exponent({cell.tokens: cell.memory for cell in self.select_cells(name) if cell.memory is not None})

    @property
    def table(self) -> Table:
        """Complexities as in table 1 of Vaswani 2017 (* not in it), and exponents in theory and as measured."""
        rows = list[tuple[Cell, ...]]()
        for each in self.mixers:
            time, memory = self.fit_time_exponent(each.name), self.fit_memory_exponent(each.name)
            rows.append(
                (
                    f"{each.name}{'' if each.vaswani else ' *'}",
                    *(f"O({order})" for order in (each.operations, each.steps, each.path)),
                    Shown(each.time, f"n^{each.time:g}"),
                    Shown(None, "–") if time is None else Shown(time.median, f"n^{time.median:.2f}"),
                    "" if time is None else f"{time.low:.2f}–{time.high:.2f}",
                    Shown(each.memory, f"n^{each.memory:g}"),
                    Shown(None, "–") if memory is None else Shown(memory, f"n^{memory:.2f}"),
                )
            )
        texts = ("layer", "operations", "steps", "path")
        exponents = ("time: theory", "time: here", "quartiles", "memory: theory", "memory: here")
        return Table(
            title=f"Exponents fitted from {FIT_FROM_TOKENS:,} tokens, and table 1 of Vaswani 2017 (* not in it): "
            "operations per layer, sequential steps, maximum path length",
            columns=tuple(Column(name=name, align="l") for name in (*texts, *exponents)),
            rows=rows,
            notes=(
                f"n tokens, width d = {self.width}; k = {KEYS_PER_QUERY} for Linformer, {KERNEL_SIZE} for convolution; "
                f"r = {KEYS_PER_QUERY}. Attention is measured from q, k, v to its output, without the linear layers, "
                "which are O(n·d²) for all. Path lengths are those of the table, for overlapping windows and dilated "
                "kernels.",
            ),
        )

    def make_table_by_tokens(self, title: str, values: Mapping[tuple[str, int], float]) -> Table:
        """One row per layer and one column per number of tokens; three significant digits."""
        return Table(
            title=title,
            columns=(Column(name="layer"), *(Column(name=f"{n:,}") for n in self.tokens)),
            rows=[
                (each.name, *(values.get((each.name, n), Shown(None, "–")) for n in self.tokens))
                for each in self.mixers
            ],
        )

    def __str__(self) -> str:
        """The machine, and the tables of exponents, time and memory."""
        times = {(each.mixer, each.tokens): 1000 * each.seconds.median for each in self.cells}
        sizes = {(each.mixer, each.tokens): each.memory / 1e6 for each in self.cells if each.memory is not None}
        titles = {
            f"CPU time in ms by number of tokens, one thread, median of {self.rounds} rounds": times,
            "Memory in MB by number of tokens: inputs and peak allocation": sizes,
        }
        tables = [self.make_table_by_tokens(title, values) for title, values in titles.items() if values]
        return "\n\n".join((f"{self.environment}\n{self.table}", *map(str, tables)))

    def to_json(self) -> dict[str, Any]:
        return {
            **self.environment.to_json(),
            "seed": self.seed,
            "width": self.width,
            "rounds": self.rounds,
            "fitted_from": FIT_FROM_TOKENS,
            "layers": [self.layer_to_json(each) for each in self.mixers],
            "cells": [asdict(cell) for cell in self.cells],
            "notes": list(self.notes),
        }

    def layer_to_json(self, mixer: TokenMixer) -> dict[str, Any]:
        time = self.fit_time_exponent(mixer.name)
        return {
            "name": mixer.name,
            "operations": f"O({mixer.operations})",
            "steps": f"O({mixer.steps})",
            "path": f"O({mixer.path})",
            "time": {"theory": mixer.time, "here": None if time is None else asdict(time)},
            "memory": {"theory": mixer.memory, "here": self.fit_memory_exponent(mixer.name)},
        }

    def figure(self) -> CaptionedFigure:
        fitted = [(each, self.fit_time_exponent(each.name)) for each in self.mixers]
        exponents = ", ".join(f"{each.name} {time.median:.2f} ({each.time:g})" for each, time in fitted if time)
        arrays = {"tokens": np.array(self.tokens)}
        for each in self.mixers:
            found = {cell.tokens: cell for cell in self.select_cells(each.name)}
            row = [found[n].seconds.median if n in found else math.nan for n in self.tokens]
            arrays[f"seconds of {each.name}"] = np.array(row)
            memory = [found[n].memory if n in found else None for n in self.tokens]
            arrays[f"bytes of {each.name}"] = np.array([math.nan if value is None else value for value in memory])
        return CaptionedFigure(
            name="cost",
            title="Cost of token mixers by sequence length",
            caption="CPU time and memory of a layer by number of tokens, on log scales. Dashed lines through the last "
            "points have the slope that theory predicts. "
            + (
                f"Exponents of time, with those of theory in brackets: {exponents}."
                if exponents
                else f"Exponents need two lengths of {FIT_FROM_TOKENS:,} tokens or more."
            ),
            arrays=arrays,
            draw=lambda: draw_cost(self),
        )

    def write(self, folder: Path) -> list[Path]:
        """Write cost.json, cost.txt and cost.png."""
        write_json(folder / "cost.json", self.to_json())
        write_text(folder / "cost.txt", f"{self}\n")
        return [folder / "cost.json", folder / "cost.txt", *self.figure().save(folder)]


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


def draw_cost(results: CostResults) -> "Figure":
    """Draw time and, if measured, memory over the number of tokens."""
    with_memory = any(cell.memory is not None for cell in results.cells)
    figure = new_figure(12 if with_memory else 6.5, 5.2)
    panels = figure.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    for number, mixer in enumerate(results.mixers):
        color, cells = PALETTE[number % len(PALETTE)], results.select_cells(mixer.name)
        time, memory = results.fit_time_exponent(mixer.name), results.fit_memory_exponent(mixer.name)
        times = {cell.tokens: 1000 * cell.seconds.median for cell in cells}
        plot_cost_line(panels[0], times, mixer.time, color, format_legend(mixer, mixer.time, time and time.median))
        if with_memory:
            sizes = {cell.tokens: cell.memory / 1e6 for cell in cells if cell.memory is not None}
            plot_cost_line(panels[1], sizes, mixer.memory, color, format_legend(mixer, mixer.memory, memory))
    style_axes(panels[0], f"CPU time of a layer (width {results.width}, one thread)")
    if with_memory:
        style_axes(panels[1], "memory: inputs and peak allocation")
    for axes, label in zip(panels, ("time (ms)", "memory (MB)"), strict=False):
        axes.set(xscale="log", yscale="log", xlabel="tokens (dashed and in brackets: theory)", ylabel=label)
        axes.set_xticks(results.tokens, [f"{n:,}" for n in results.tokens], fontsize=NOTE_POINTS, rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=NOTE_POINTS)
    return figure


def format_legend(mixer: TokenMixer, theory: float, fitted: float | None) -> str:
    return mixer.name if fitted is None else f"{mixer.name}: $n^{{{fitted:.2f}}}$ ({theory:g})"


def plot_cost_line(axes: "Axes", points: Mapping[int, float], theory: float, color: str, label: str) -> None:
    """Plot measurements and, dashed over the fitted range, a line of the theoretical slope through the last point."""
    if not points:
        return
    last = max(points)
    axes.plot(list(points), list(points.values()), color=color, marker="o", markersize=4, linewidth=1.6, label=label)
    fitted = [n for n in points if n >= FIT_FROM_TOKENS]
    axes.plot(fitted, [points[last] * (n / last) ** theory for n in fitted], color=color, linestyle="--", alpha=0.7)
