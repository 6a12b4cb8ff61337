"""What a benchmark found: as tables, as JSON and as a picture."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail import __version__
from vitrail.figures import COLOURS, GREY, CaptionedFigure, new_figure, sanitize_label, style_axes
from vitrail.files import make_folder, write_atomically
from vitrail.machine import describe_machine
from vitrail.study.bench_engines import format_image_size
from vitrail.study.bench_startup import StartupMeasurement
from vitrail.study.timing import CallTimings, MedianAndQuartiles
from vitrail.text import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADING = ("model", "pixels", "batch", "threads", "by", "images/s", "ms: p50", "p90", "p99", "MB", "start s")
SIDES = "lrrrlrrrrrr"
PACKAGES = ("torch", "onnxruntime", "numpy", "timm", "transformers")
MAX_MODEL_NAME_LENGTH = 44  # letters of a model's name in the picture


@dataclass(frozen=True, kw_only=True)
class BenchLine:
    """One way to run one model: medians, and a spread where it says how far to trust them."""

    model: str
    image_size: tuple[int, int]
    batch: int
    threads: int
    way: str  # an engine, with × 2 for two streams, or a peer
    exact: bool
    images_per_second: MedianAndQuartiles
    latency: tuple[float, float, float]  # ms of a batch: 50th, 90th and 99th percentile of all calls
    calls: int
    rounds: int
    base: str  # the way that `ratio` is to
    ratio: MedianAndQuartiles  # times as fast, within each round
    start: float | None  # seconds from nothing to the first answer
    memory: float | None  # MB resident at most, of a process that has done nothing else
    apart: float | None  # largest difference in a probability to the base

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
    notes: tuple[str, ...]  # what is left out, and why
    seed: int
    machine: str
    versions: dict[str, str]
    when: str

    @classmethod
    def from_lines(cls, lines: Sequence[BenchLine], *, notes: tuple[str, ...] = (), seed: int = 0) -> "BenchResults":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            lines=tuple(lines),
            notes=notes,
            seed=seed,
            machine=describe_machine(),
            versions=collect_versions(),
            when=now,
        )

    def __str__(self) -> str:
        return "\n".join(format_table(*self.cells()))

    def cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
        """Heading, rows and sides of the whole table; columns that nobody measured are not in it."""
        bases = {line.base for line in self.lines}
        heading = (*HEADING, f"to {bases.pop()}" if len(bases) == 1 else "to the first", "quartiles")
        rows = [(*format_row(line), format_ratio(line), format_quartiles(line.ratio)) for line in self.lines]
        keep = [n for n in range(len(heading)) if any(each[n] for each in rows)]
        sides = SIDES + "rl"
        return (
            tuple(heading[n] for n in keep),
            [tuple(each[n] for n in keep) for each in rows],
            "".join(sides[n] for n in keep),
        )

    def throughput_cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
        """Heading, rows and sides of images/s by model and resolution, one column a way."""
        ways = list(dict.fromkeys(line.way for line in self.lines))
        found = {(line.case, line.way): f"{line.images_per_second.median:.1f}" for line in self.lines}
        rows = [
            (
                case[0],
                format_image_size(case[1]),
                str(case[2]),
                str(case[3]),
                *(found.get((case, way), "") for way in ways),
            )
            for case in dict.fromkeys(line.case for line in self.lines)
        ]
        return ("model", "pixels", "batch", "threads", *ways), rows, "lrrr" + "r" * len(ways)

    def to_json(self) -> dict[str, Any]:
        return {
            "vitrail": __version__,
            "when": self.when,
            "machine": self.machine,
            "versions": self.versions,
            "seed": self.seed,
            "lines": [line.to_json() for line in self.lines],
            "notes": list(self.notes),
        }

    def figure(self) -> CaptionedFigure:
        """Images a second and ratios, a dot between its quartiles for each way."""
        numbers = {
            name: np.array(
                [[getattr(line, name).low, getattr(line, name).median, getattr(line, name).high] for line in self.lines]
            )
            for name in ("images_per_second", "ratio")
        }
        best = max(self.lines, key=lambda line: line.ratio.median)
        return CaptionedFigure(
            name="bench",
            title="How fast models answer",
            caption="Images a second by model and engine, and times as fast as the first of each group; the line "
            f"around a dot is from quartile to quartile of the rounds. The most: {best.way} for {best.model}, "
            f"{best.ratio.median:.2f} × {best.base}.",
            arrays={**numbers, "latency": np.array([line.latency for line in self.lines])},
            draw=lambda: draw_benchmark(self.lines),
        )

    def write(self, folder: Path) -> list[Path]:
        """bench.json, bench.txt and bench.png."""
        make_folder(folder)
        texts = {"bench.json": json.dumps(self.to_json(), indent=2, ensure_ascii=False), "bench.txt": str(self)}
        for name, text in texts.items():
            write_atomically(folder / name, lambda place, text=text: place.write_text(f"{text}\n", "utf-8"))
        return [*(folder / name for name in texts), *self.figure().save(folder)]


def format_row(line: BenchLine) -> tuple[str, ...]:
    return (
        line.model,
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


def collect_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "vitrail": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def draw_benchmark(lines: Sequence[BenchLine]) -> "Figure":
    """One row a way, grouped by case; on the left images/s, on the right the ratio."""
    ways = list(dict.fromkeys(line.way for line in lines))
    colours = {way: COLOURS[n % len(COLOURS)] for n, way in enumerate(ways)}
    places, cases, at = list[float](), dict[Any, float](), 0.0
    for line in lines:
        if line.case not in cases:
            at += 1.4 if cases else 0.0
            cases[line.case] = at
        places.append(at)
        at += 1.0
    figure = new_figure(11, 1.6 + 0.27 * at)
    left, right = figure.subplots(1, 2, sharey=True)
    for place, line in zip(places, lines, strict=True):
        for axes, each in ((left, line.images_per_second), (right, line.ratio)):
            axes.plot((each.low, each.high), (place, place), color=colours[line.way], linewidth=2.2, alpha=0.55)
            axes.plot(each.median, place, "o", color=colours[line.way], markersize=6)
    for case, top in cases.items():
        model, size, batch, threads = case
        name = (
            model if len(model) <= MAX_MODEL_NAME_LENGTH else f"…{model[1 - MAX_MODEL_NAME_LENGTH :]}"
        )  # of a path the end says most
        label, plural = sanitize_label(name, MAX_MODEL_NAME_LENGTH), "s" * (threads != 1)
        said = f"{label}  {format_image_size(size)} px, batch {batch}, {threads} thread{plural}"
        left.text(0.01, top - 0.55, said, fontsize=8, transform=left.get_yaxis_transform(), parse_math=False)
    speeds = [line.images_per_second.median for line in lines]
    if max(speeds) > 20 * min(speeds):
        left.set_xscale("log")
    else:
        left.set_xlim(left=0)
    right.axvline(1, color=GREY, linewidth=1, zorder=0)
    left.set_yticks(places, [line.way for line in lines], fontsize=8)
    left.set_ylim(max(places) + 0.8, -1.1)
    style_axes(left, "images a second")
    bases = {line.base for line in lines}
    style_axes(right, f"times as fast as {bases.pop() if len(bases) == 1 else 'the first'}")
    left.set_xlabel("images/s" + (", logarithmic" if left.get_xscale() == "log" else ""))
    right.set_xlabel("ratio within a round: median, quartiles")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    return figure
