"""Results of a benchmark: as tables, as JSON and as a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label, style_axes
from vitrail.base.style import GREY, NOTE_POINTS, PALETTE
from vitrail.base.text import TableCells, format_count, format_table
from vitrail.models.catalog.preset_list import shorten_model_names
from vitrail.study.bench_engines import format_image_size
from vitrail.study.bench_startup import StartupMeasurement
from vitrail.study.result_files import Environment, format_json, write_texts_to_folder
from vitrail.study.timing import CallTimings, MedianAndQuartiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADING = ("model", "pixels", "batch", "threads", "by", "images/s", "ms: p50", "p90", "p99", "MB", "start s")
ALIGNMENTS = "lrrrlrrrrrr"
MAX_MODEL_NAME_LENGTH = 44  # in the figure


@dataclass(frozen=True, kw_only=True)
class BenchLine:
    """One model on one engine: medians, with quartiles for speeds and ratios."""

    model: str
    image_size: tuple[int, int]
    batch: int
    threads: int
    way: str  # an engine, with × 2 for two streams, or a peer
    exact: bool
    images_per_second: MedianAndQuartiles
    latency: tuple[float, float, float]  # ms per batch: 50th, 90th and 99th percentile of all calls
    calls: int
    rounds: int
    base: str  # the engine that `ratio` is relative to
    ratio: MedianAndQuartiles  # speed relative to the base, within each round
    start: float | None  # seconds from starting the process to the first prediction
    memory: float | None  # peak resident MB of a new process
    apart: float | None  # largest difference of a probability from the base

    @classmethod
    def from_timings(cls, timed: CallTimings, *, starts: Sequence[StartupMeasurement], **about: Any) -> "BenchLine":
        p50, p90, p99 = (1000 * float(each) for each in np.percentile(timed.calls, (50, 90, 99)))
        return cls(
            images_per_second=MedianAndQuartiles.from_values([about["batch"] / mean for mean in timed.mean_seconds]),
            latency=(p50, p90, p99),
            calls=len(timed.calls),
            rounds=len(timed.rounds),
            start=median(each.seconds for each in starts) if starts else None,
            memory=median(each.megabytes for each in starts) if starts else None,
            **about,
        )

    @property
    def case(self) -> tuple[str, tuple[int, int], int, int]:
        return self.model, self.image_size, self.batch, self.threads

    def to_json(self) -> dict[str, Any]:
        p50, p90, p99 = self.latency
        return {**asdict(self), "latency": {"p50": p50, "p90": p90, "p99": p99}}


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    lines: tuple[BenchLine, ...]
    notes: tuple[str, ...] = ()  # what was left out, and why
    seed: int = 0
    environment: Environment = field(default_factory=Environment)

    def __str__(self) -> str:
        return "\n".join(format_table(*self.cells()))

    def cells(self) -> TableCells:
        """The full table, without columns that were not measured."""
        bases = {line.base for line in self.lines}
        heading = (*HEADING, f"to {bases.pop()}" if len(bases) == 1 else "to the first", "quartiles")
        rows = [
            (self.short_names[line.model], *format_row(line), format_ratio(line), format_quartiles(line.ratio))
            for line in self.lines
        ]
        keep = [n for n in range(len(heading)) if any(each[n] for each in rows)]
        alignments = ALIGNMENTS + "rl"
        return (
            tuple(heading[n] for n in keep),
            [tuple(each[n] for n in keep) for each in rows],
            "".join(alignments[n] for n in keep),
        )

    @property
    def short_names(self) -> dict[str, str]:
        """The models by the ends of their paths."""
        models = list(dict.fromkeys(line.model for line in self.lines))
        return dict(zip(models, shorten_model_names(models), strict=True))

    def format_throughput(self) -> list[str]:
        """The lines of a second table, images/s by model and resolution; none for a single one."""
        if len({(line.model, line.image_size) for line in self.lines}) < 2:
            return []
        return ["\nimages/s by model and resolution", *format_table(*self.throughput_cells())]

    def throughput_cells(self) -> TableCells:
        """Table of images/s by model and resolution, with one column per engine."""
        engines = list(dict.fromkeys(line.way for line in self.lines))
        speeds = {(line.case, line.way): f"{line.images_per_second.median:.1f}" for line in self.lines}
        rows = [
            (
                self.short_names[case[0]],
                format_image_size(case[1]),
                str(case[2]),
                str(case[3]),
                *(speeds.get((case, engine), "") for engine in engines),
            )
            for case in dict.fromkeys(line.case for line in self.lines)
        ]
        return ("model", "pixels", "batch", "threads", *engines), rows, "lrrr" + "r" * len(engines)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.environment.to_json(),
            "seed": self.seed,
            "lines": [line.to_json() for line in self.lines],
            "notes": list(self.notes),
        }

    def figure(self) -> CaptionedFigure:
        """Figure of images per second and ratios, each a dot with its quartiles."""
        speeds, ratios = [line.images_per_second for line in self.lines], [line.ratio for line in self.lines]
        numbers = {
            name: np.array([[each.low, each.median, each.high] for each in values])
            for name, values in (("images_per_second", speeds), ("ratio", ratios))
        }
        best = max(self.lines, key=lambda line: line.ratio.median)
        return CaptionedFigure(
            name="bench",
            title="Speed of prediction",
            caption="Images per second by model and engine (left), and speed relative to the first engine of each "
            "group (right). Dots are medians over rounds; lines span the quartiles. "
            f"Largest ratio: {best.way} for {self.short_names[best.model]}, {best.ratio.median:.2f} × {best.base}.",
            arrays={**numbers, "latency": np.array([line.latency for line in self.lines])},
            draw=lambda: draw_benchmark(self.lines, self.short_names),
        )

    def write(self, folder: Path) -> list[Path]:
        """Write bench.json, bench.txt and bench.png."""
        texts = {"bench.json": format_json(self.to_json()), "bench.txt": f"{self}\n"}
        return [*write_texts_to_folder(folder, texts), *self.figure().save(folder)]


def format_row(line: BenchLine) -> tuple[str, ...]:
    return (
        format_image_size(line.image_size),
        str(line.batch),
        str(line.threads),
        line.way,
        f"{line.images_per_second.median:.1f}",
        *(f"{each:.{1 if each >= 10 else 2}f}" for each in line.latency),
        "" if line.memory is None else f"{line.memory:.0f}",
        "" if line.start is None else f"{line.start:.2f}",
    )


def format_ratio(line: BenchLine) -> str:
    return "1" if line.way == line.base else f"{line.ratio.median:.2f}"


def format_quartiles(spread: MedianAndQuartiles) -> str:
    return "" if spread.low == spread.high else f"{spread.low:.2f}–{spread.high:.2f}"


def draw_benchmark(lines: Sequence[BenchLine], names: Mapping[str, str]) -> "Figure":
    """Draw one row per engine, grouped by case: images/s on the left, ratios on the right."""
    engines = list(dict.fromkeys(line.way for line in lines))
    colours = {engine: PALETTE[n % len(PALETTE)] for n, engine in enumerate(engines)}
    positions, cases, y = list[float](), dict[Any, float](), 0.0
    for line in lines:
        if line.case not in cases:
            y += 1.4 if cases else 0.0
            cases[line.case] = y
        positions.append(y)
        y += 1.0
    figure = new_figure(11, 1.6 + 0.27 * y)
    left, right = figure.subplots(1, 2, sharey=True)
    for position, line in zip(positions, lines, strict=True):
        for axes, each in ((left, line.images_per_second), (right, line.ratio)):
            axes.plot((each.low, each.high), (position, position), color=colours[line.way], linewidth=2.2, alpha=0.55)
            axes.plot(each.median, position, "o", color=colours[line.way], markersize=6)
    for case, top in cases.items():
        model, size, batch, threads = case
        label = sanitize_label(names[model], MAX_MODEL_NAME_LENGTH)
        case_threads = format_count(threads, "thread")
        title = f"{label}  {format_image_size(size)} px, batch {batch}, {case_threads}"
        left.text(0.01, top - 0.55, title, fontsize=NOTE_POINTS, transform=left.get_yaxis_transform(), parse_math=False)
    speeds = [line.images_per_second.median for line in lines]
    if max(speeds) > 20 * min(speeds):
        left.set_xscale("log")
    else:
        left.set_xlim(left=0)
    right.axvline(1, color=GREY, linewidth=1, zorder=0)
    left.set_yticks(positions, [line.way for line in lines], fontsize=NOTE_POINTS)
    left.set_ylim(max(positions) + 0.8, -1.1)
    style_axes(left, "images per second")
    bases = {line.base for line in lines}
    style_axes(right, f"speed relative to {bases.pop() if len(bases) == 1 else 'the first'}")
    left.set_xlabel("images/s" + (", log scale" if left.get_xscale() == "log" else ""))
    right.set_xlabel("ratio within a round (median, quartiles)")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    return figure
