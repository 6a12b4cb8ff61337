"""What a study of cost found: exponents beside the theory, as tables, as JSON and as a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail import __version__
from vitrail.figures import COLOURS, Plate, new_figure, plain_axes
from vitrail.files import make_folder, write_whole
from vitrail.study.bench_results import machine, versions
from vitrail.study.mixing import KERNEL, KEYS, Mixer
from vitrail.study.turns import Spread
from vitrail.tables import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FROM = 1024  # tokens: exponents are fitted from there on, where the work is larger than the call

Table = tuple[tuple[str, ...], list[tuple[str, ...]], str]  # heading, rows, sides


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to mix so many tokens."""

    mixer: str
    tokens: int
    seconds: Spread  # of a call, over the rounds
    rounds: tuple[float, ...]  # its seconds in each
    memory: int | None  # bytes

    @classmethod
    def of(cls, seconds: Sequence[float], **about: Any) -> "Cell":
        return cls(seconds=Spread.of(seconds), rounds=tuple(seconds), **about)


def exponent(points: Mapping[int, float]) -> float | None:
    """p of cost ∝ n^p: the slope of a straight line through log n and log cost, by least squares, from FROM on."""
    far = {math.log(n): math.log(cost) for n, cost in points.items() if n >= FROM and cost > 0}
    return linear_regression(list(far), list(far.values())).slope if len(far) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Study:
    cells: tuple[Cell, ...]
    mixers: tuple[Mixer, ...]
    width: int
    rounds: int
    notes: tuple[str, ...]  # what is left out, and why
    seed: int
    machine: str
    versions: dict[str, str]
    when: str

    @classmethod
    def of(cls, cells: Sequence[Cell], *, mixers: Sequence[Mixer], notes: Sequence[str], **about: Any) -> "Study":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        known = {"machine": machine(), "versions": versions(), "when": now}
        return cls(cells=tuple(cells), mixers=tuple(mixers), notes=tuple(notes), **known, **about)

    @property
    def tokens(self) -> list[int]:
        return sorted({cell.tokens for cell in self.cells})

    def of_mixer(self, name: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.mixer == name]

    def time_exponent(self, name: str) -> Spread | None:
        """Fitted in each round by itself, whose cells were measured side by side; the median and its quartiles."""
        cells = self.of_mixer(name)
        fits = [exponent({cell.tokens: cell.rounds[n] for cell in cells}) for n in range(self.rounds)]
        found = [each for each in fits if each is not None]
        return Spread.of(found) if found else None

    def memory_exponent(self, name: str) -> float | None:
        return exponent({cell.tokens: cell.memory for cell in self.of_mixer(name) if cell.memory is not None})

    def exponents(self) -> Table:
        """The orders of table 1 of Vaswani 2017, or for * of its kind, then the exponents: theory, here."""
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
            time, memory = self.time_exponent(each.name), self.memory_exponent(each.name)
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

    def times(self) -> Table:
        return self.by_tokens({(each.mixer, each.tokens): short(1000 * each.seconds.median) for each in self.cells})

    def memories(self) -> Table:
        known = [cell for cell in self.cells if cell.memory is not None]
        return self.by_tokens({(each.mixer, each.tokens): short((each.memory or 0) / 1e6) for each in known})

    def by_tokens(self, shown: Mapping[tuple[str, int], str]) -> Table:
        rows = [(each.name, *(shown.get((each.name, n), "–") for n in self.tokens)) for each in self.mixers]
        return ("layer", *(f"{n:,}" for n in self.tokens)), rows, "l" + "r" * len(self.tokens)

    def __str__(self) -> str:
        parts = [
            f"Exponents from {FROM:,} tokens on, beside table 1 of Vaswani 2017 (* not in it): operations of a layer, "
            "steps one after another, longest path",
            *text_table(*self.exponents()),
            f"n tokens, width d = {self.width}; k = {KEYS} for Linformer, {KERNEL} for the convolution; r = {KEYS}. "
            "Attention is q, k, v → out, without the linear maps around it, which are O(n·d²) for all. "
            "Paths are the table's: of windows that overlap, and of dilated kernels.",
            f"\nms of processor time by tokens, one thread, median of {self.rounds} rounds",
            *text_table(*self.times()),
        ]
        if any(cell.memory is not None for cell in self.cells):
            parts += [
                "\nMB by tokens: what the layer reads, and the most that it allocates",
                *text_table(*self.memories()),
            ]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "vitrail": __version__,
            "when": self.when,
            "machine": self.machine,
            "versions": self.versions,
            "seed": self.seed,
            "width": self.width,
            "rounds": self.rounds,
            "fitted_from": FROM,
            "layers": [self.layer(each) for each in self.mixers],
            "cells": [asdict(cell) for cell in self.cells],
            "notes": list(self.notes),
        }

    def layer(self, mixer: Mixer) -> dict[str, Any]:
        time = self.time_exponent(mixer.name)
        return {
            "name": mixer.name,
            **{each: f"O({getattr(mixer, each)})" for each in ("operations", "steps", "path")},
            "time": {"theory": mixer.time, "here": None if time is None else asdict(time)},
            "memory": {"theory": mixer.memory, "here": self.memory_exponent(mixer.name)},
        }

    def plate(self) -> Plate:
        fitted = [(each, self.time_exponent(each.name)) for each in self.mixers]
        said = ", ".join(f"{each.name} {time.median:.2f} ({each.time:g})" for each, time in fitted if time)
        arrays = {"tokens": np.array(self.tokens)}
        for each in self.mixers:
            found = {cell.tokens: cell for cell in self.of_mixer(each.name)}
            row = [found[n].seconds.median if n in found else math.nan for n in self.tokens]
            arrays[f"seconds of {each.name}"] = np.array(row)
            memory = [found[n].memory if n in found else None for n in self.tokens]
            arrays[f"bytes of {each.name}"] = np.array([math.nan if value is None else value for value in memory])
        return Plate(
            name="cost",
            title="What a layer costs as the sequence grows",
            caption="Processor time and memory by the number of tokens, both logarithmic; dashed, through the "
            "last point of each, is what theory says. Exponents of time"
            + (f", in brackets those of theory: {said}." if said else f" need two lengths of {FROM:,} tokens or more."),
            arrays=arrays,
            draw=lambda: drawn(self),
        )

    def write(self, folder: Path) -> list[Path]:
        """cost.json, cost.txt and cost.png."""
        make_folder(folder)
        texts = {"cost.json": json.dumps(self.to_json(), indent=2, ensure_ascii=False), "cost.txt": str(self)}
        for name, text in texts.items():
            write_whole(folder / name, lambda place, text=text: place.write_text(f"{text}\n", "utf-8"))
        return [*(folder / name for name in texts), *self.plate().save(folder)]


def short(number: float) -> str:
    """Three figures, or all before the point."""
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}" if 0 < number < 1000 else f"{number:,.0f}"


def drawn(study: Study) -> "Figure":
    """Two panels of one axis: time, and memory where it was measured."""
    remembered = any(cell.memory is not None for cell in study.cells)
    figure = new_figure(12 if remembered else 6.5, 5.2)
    panels = figure.subplots(1, 2 if remembered else 1, squeeze=False)[0]
    for number, mixer in enumerate(study.mixers):
        colour, cells = COLOURS[number % len(COLOURS)], study.of_mixer(mixer.name)
        time, memory = study.time_exponent(mixer.name), study.memory_exponent(mixer.name)
        times = {cell.tokens: 1000 * cell.seconds.median for cell in cells}
        line(panels[0], times, mixer.time, colour, legend(mixer, mixer.time, time and time.median))
        if remembered:
            sizes = {cell.tokens: cell.memory / 1e6 for cell in cells if cell.memory is not None}
            line(panels[1], sizes, mixer.memory, colour, legend(mixer, mixer.memory, memory))
    plain_axes(panels[0], f"processor time of a layer, ms (width {study.width}, one thread)")
    if remembered:
        plain_axes(panels[1], "memory: what it reads, and the most that it allocates, MB")
    for axes, label in zip(panels, ("ms", "MB"), strict=False):
        axes.set(xscale="log", yscale="log", xlabel="tokens; dashed and in brackets: theory", ylabel=label)
        axes.set_xticks(study.tokens, [f"{n:,}" for n in study.tokens], fontsize=8, rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    return figure


def legend(mixer: Mixer, theory: float, fitted: float | None) -> str:
    return mixer.name if fitted is None else f"{mixer.name}: $n^{{{fitted:.2f}}}$ ({theory:g})"


def line(axes: "Axes", points: Mapping[int, float], theory: float, colour: str, label: str) -> None:
    """What was measured; and dashed, where exponents are fitted, a line of the theory's slope that ends in the last."""
    if not points:
        return
    last = max(points)
    axes.plot(list(points), list(points.values()), color=colour, marker="o", markersize=4, linewidth=1.6, label=label)
    far = [n for n in points if n >= FROM]
    axes.plot(far, [points[last] * (n / last) ** theory for n in far], color=colour, linestyle="--", alpha=0.7)
