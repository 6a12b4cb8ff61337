"""Results of the cost study: exponents compared with theory, as tables, JSON and a figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import NOTE_POINTS, PALETTE
from vitrail.base.text import TableCells, format_table
from vitrail.study.result_files import Environment, format_json, write_texts_to_folder
from vitrail.study.timing import MedianAndQuartiles
from vitrail.study.token_mixers import KERNEL_SIZE, KEYS_PER_QUERY, TokenMixer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIT_FROM_TOKENS = 1024  # exponents are fitted from here, where the work exceeds the overhead of a call


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

    def exponent_table(self) -> TableCells:
        """Complexities as in table 1 of Vaswani 2017 (* not in it), and exponents in theory and as measured."""
        heading = (
            "layer",
            "operations",
            "steps",
            "path",
            "time: theory",
            "here",
            "quartiles",
            "memory: theory",
            "here",
        )
        rows = list[tuple[str, ...]]()
        for each in self.mixers:
            time, memory = self.fit_time_exponent(each.name), self.fit_memory_exponent(each.name)
            rows.append(
                (
                    f"{each.name}{'' if each.vaswani else ' *'}",
                    *(f"O({order})" for order in (each.operations, each.steps, each.path)),
                    f"n^{each.time:g}",
                    "–" if time is None else f"n^{time.median:.2f}",
                    "" if time is None else f"{time.low:.2f}–{time.high:.2f}",
                    f"n^{each.memory:g}",
                    "–" if memory is None else f"n^{memory:.2f}",
                )
            )
        return heading, rows, "l" * len(heading)

    def time_table(self) -> TableCells:
        return self.table_by_tokens(
            {(each.mixer, each.tokens): format_three_digits(1000 * each.seconds.median) for each in self.cells}
        )

    def memory_table(self) -> TableCells:
        known = [cell for cell in self.cells if cell.memory is not None]
        return self.table_by_tokens(
            {(each.mixer, each.tokens): format_three_digits((each.memory or 0) / 1e6) for each in known}
        )

    def table_by_tokens(self, texts: Mapping[tuple[str, int], str]) -> TableCells:
        rows = [(each.name, *(texts.get((each.name, n), "–") for n in self.tokens)) for each in self.mixers]
        return ("layer", *(f"{n:,}" for n in self.tokens)), rows, "l" + "r" * len(self.tokens)

    def __str__(self) -> str:
        parts = [
            f"Exponents fitted from {FIT_FROM_TOKENS:,} tokens, and table 1 of Vaswani 2017 (* not in it): "
            "operations per layer, sequential steps, maximum path length",
            *format_table(*self.exponent_table()),
            f"n tokens, width d = {self.width}; k = {KEYS_PER_QUERY} for Linformer, {KERNEL_SIZE} for convolution; "
            f"r = {KEYS_PER_QUERY}. "
            "Attention is measured from q, k, v to its output, without the linear layers, which are O(n·d²) for all. "
            "Path lengths are those of the table, for overlapping windows and dilated kernels.",
            f"\nCPU time in ms by number of tokens, one thread, median of {self.rounds} rounds",
            *format_table(*self.time_table()),
        ]
        if any(cell.memory is not None for cell in self.cells):
            parts += [
                "\nMemory in MB by number of tokens: inputs and peak allocation",
                *format_table(*self.memory_table()),
            ]
        return "\n".join(parts)

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
        texts = {"cost.json": format_json(self.to_json()), "cost.txt": f"{self}\n"}
        return [*write_texts_to_folder(folder, texts), *self.figure().save(folder)]


def format_three_digits(number: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}" if 0 < number < 1000 else f"{number:,.0f}"


def draw_cost(results: CostResults) -> "Figure":
    """Draw time and, if measured, memory over the number of tokens."""
    with_memory = any(cell.memory is not None for cell in results.cells)
    figure = new_figure(12 if with_memory else 6.5, 5.2)
    panels = figure.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    for number, mixer in enumerate(results.mixers):
        colour, cells = PALETTE[number % len(PALETTE)], results.select_cells(mixer.name)
        time, memory = results.fit_time_exponent(mixer.name), results.fit_memory_exponent(mixer.name)
        times = {cell.tokens: 1000 * cell.seconds.median for cell in cells}
        plot_cost_line(panels[0], times, mixer.time, colour, format_legend(mixer, mixer.time, time and time.median))
        if with_memory:
            sizes = {cell.tokens: cell.memory / 1e6 for cell in cells if cell.memory is not None}
            plot_cost_line(panels[1], sizes, mixer.memory, colour, format_legend(mixer, mixer.memory, memory))
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


def plot_cost_line(axes: "Axes", points: Mapping[int, float], theory: float, colour: str, label: str) -> None:
    """Plot measurements and, dashed over the fitted range, a line of the theoretical slope through the last point."""
    if not points:
        return
    last = max(points)
    axes.plot(list(points), list(points.values()), color=colour, marker="o", markersize=4, linewidth=1.6, label=label)
    fitted = [n for n in points if n >= FIT_FROM_TOKENS]
    axes.plot(fitted, [points[last] * (n / last) ** theory for n in fitted], color=colour, linestyle="--", alpha=0.7)
