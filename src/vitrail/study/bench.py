"""Benchmark prediction: engines and peers interleaved, by model, image size, batch and threads; memory and start-up."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, VitrailError, describe_error, unknown_name_error
from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label, style_axes
from vitrail.base.files import write_json
from vitrail.base.machine import restore_threads
from vitrail.base.style import GRAY, NOTE_POINTS, PALETTE
from vitrail.base.table import Column, Shown, Table
from vitrail.base.text import format_count
from vitrail.checkpoint.hub import is_hub_name
from vitrail.models.catalog.external_families import is_external_family_name, trust
from vitrail.models.catalog.preset_costs import shorten_model_names
from vitrail.predict.predictions import softmax
from vitrail.study.bench_engines import (
    ENGINES,
    ENGINES_WITH_STREAMS,
    PEERS,
    BenchEngine,
    ModelFiles,
    StartupError,
    StartupMeasurement,
    check_peers_installed,
    format_image_size,
    make_predict_step,
    measure_startup,
)
from vitrail.study.timing import (
    PROGRESS_PARTS,
    CallTimings,
    Environment,
    FractionProgress,
    MedianAndQuartiles,
    Progress,
    time_interleaved,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PEER_DIFFERENCE = 1e-3  # in a probability, for a peer with the same weights
MAX_MODEL_NAME_LENGTH = 44  # in the figure
TIMING_SHARE = 0.7  # of the time of a case; the rest is start-up


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to measure: every combination of these values."""

    models: Sequence[str]  # names, checkpoints, exported folders
    engines: Sequence[str] | None = None  # default: chosen for the model
    sizes: Sequence[tuple[int, int] | None] = (None,)  # None: the model's size
    batches: Sequence[int] = (1, 8)
    threads: Sequence[int] = (2,)
    peers: Sequence[str] = ()
    rounds: int | None = None  # default: as many as take about `seconds` per engine
    seconds: float = 3.0
    starts: int = 1  # new processes per engine for memory and start-up; 0: not measured
    seed: int = 0
    fields: Mapping[str, Any] | None = None  # config fields that a checkpoint does not specify
    preprocessing: Mapping[str, Any] | None = None  # fields of the preprocessing to change
    imports: Sequence[str] = ()  # modules that a new process imports first

    def __post_init__(self) -> None:
        for kind, given, known in (("engine", self.engines or (), ENGINES), ("peer", self.peers, PEERS)):
            for name in given:
                if name not in known:
                    raise unknown_name_error(kind, name, known)
        for name, values in (("batches", self.batches), ("threads", self.threads)):
            for value in values:
                if value < 1:
                    raise ConfigError(f"`{name}` is {value}; expected 1 or more")
        if self.starts < 0:
            raise ConfigError(f"`starts` is {self.starts}; expected 0 or more")
        if self.seed < 0:
            raise ConfigError(f"`seed` is {self.seed}; expected 0 or more")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"`rounds` is {self.rounds}; expected 1 or more")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"`seconds` is {self.seconds:g}; expected more than 0 and at most 3600")
        if not (self.models and self.sizes and self.batches and self.threads) or self.engines == ():
            raise ConfigError("nothing to measure; expected at least one model and one engine")

    @property
    def progress_total(self) -> int:
        """The sum of all calls of `progress`."""
        return PROGRESS_PARTS * len(self.models) * len(self.sizes) * len(self.batches) * len(self.threads)


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

    @property
    def table(self) -> Table:
        """One row per model and engine, without columns that were not measured."""
        bases = {line.base for line in self.lines}
        return Table(
            columns=(
                Column(name="model"),
                Column(name="pixels", align="r"),
                Column(name="batch"),
                Column(name="threads"),
                Column(name="by"),
                Column(name="images/s", digits=1),
                Column(name="ms: p50"),
                Column(name="p90"),
                Column(name="p99"),
                Column(name="MB", digits=0),
                Column(name="start s", digits=2),
                Column(name=f"to {bases.pop()}" if len(bases) == 1 else "to the first", digits=2),
                Column(name="quartiles"),
            ),
            rows=[
                (
                    Shown(line.model, self.short_names[line.model]),
                    format_image_size(line.image_size),
                    line.batch,
                    line.threads,
                    line.way,
                    line.images_per_second.median,
                    *line.latency,
                    line.memory,
                    line.start,
                    Shown(1.0, "1") if line.way == line.base else line.ratio.median,
                    format_quartiles(line.ratio),
                )
                for line in self.lines
            ],
        ).drop_empty_columns()

    def make_throughput_table(self) -> Table:
        """Images/s by model and resolution, with one column per engine."""
        engines = list(dict.fromkeys(line.way for line in self.lines))
        speeds = {(line.case, line.way): line.images_per_second.median for line in self.lines}
        columns = [Column(name="model"), Column(name="pixels", align="r"), Column(name="batch"), Column(name="threads")]
        return Table(
            title="images/s by model and resolution",
            columns=(*columns, *(Column(name=engine, digits=1) for engine in engines)),
            rows=[
                (
                    self.short_names[model],
                    format_image_size(size),
                    batch,
                    threads,
                    *(speeds.get(((model, size, batch, threads), engine)) for engine in engines),
                )
                for model, size, batch, threads in dict.fromkeys(line.case for line in self.lines)
            ],
        )

    def __str__(self) -> str:
        """The machine, the table and, for several models or resolutions, images/s next to each other."""
        several = len({(line.model, line.image_size) for line in self.lines}) > 1
        first = f"{self.environment}\n{self.table}"
        return f"{first}\n\n{self.make_throughput_table()}" if several else first

    @property
    def short_names(self) -> dict[str, str]:
        """The models by the ends of their paths."""
        models = list(dict.fromkeys(line.model for line in self.lines))
        return dict(zip(models, shorten_model_names(models), strict=True))

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
        write_json(folder / "bench.json", self.to_json())
        self.table.write(folder / "bench.txt")
        return [folder / "bench.json", folder / "bench.txt", *self.figure().save(folder)]


def run_benchmark(
    request: BenchRequest, *, folder: Path | None = None, progress: Progress = lambda _: None
) -> BenchResults:
    """Measure every combination; what cannot be measured is left out and listed in the notes of the results.

    `folder` is for the files of each engine, by default a temporary one. It is an error if nothing can be measured.
    """
    check_peers_installed(tuple(request.peers))
    lines, notes = list[BenchLine](), list[str]()
    own = [each for each in request.models if is_external_family_name(each) and not is_hub_name(each)]
    with folder_or_temporary(folder) as root, restore_threads(), trust(own):
        for number, model in enumerate(request.models):
            for size in request.sizes:
                model_folder = root / f"{number}-{'own' if size is None else format_image_size(size)}"
                cases = len(request.batches) * len(request.threads)
                try:
                    model_files = ModelFiles(
                        model, size, model_folder, request.seed, request.fields, request.preprocessing
                    )
                except VitrailError as error:
                    if len(request.models) * len(request.sizes) == 1:
                        raise
                    notes.append(
                        f"{model}{'' if size is None else f' at {format_image_size(size)}'} is left out: {error}"
                    )
                    progress(PROGRESS_PARTS * cases)
                    continue
                for threads in request.threads:
                    for batch in request.batches:
                        lines += BenchCase(request, model_files, batch, threads, notes, progress).measure_lines()
    if not lines:
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(notes))}")
    return BenchResults(lines=tuple(lines), notes=tuple(dict.fromkeys(notes)), seed=request.seed)


@contextmanager
def folder_or_temporary(folder: Path | None) -> Generator[Path]:
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="vitrail-bench-") as temporary:
        yield Path(temporary)


class BenchCase:
    """All engines for one model, image size, batch and number of threads."""

    def __init__(
        self,
        request: BenchRequest,
        model_files: ModelFiles,
        batch: int,
        threads: int,
        notes: list[str],
        progress: Progress = lambda _: None,
    ) -> None:
        self.request, self.model_files, self.batch, self.threads = request, model_files, batch, threads
        self.notes, self.progress = notes, FractionProgress(progress)

    def measure_lines(self) -> list[BenchLine]:
        """Lines of all engines, all compared with the first: a peer, if there is one."""
        steps, probabilities = dict[str, Callable[[], Any]](), dict[str, NDArray[np.float32]]()
        engines, pixels = dict[str, BenchEngine](), self.model_files.make_pixels(self.batch, self.request.seed)
        for name, streams in self.list_engines():
            try:
                engine = self.model_files.make_engine(name, self.threads, streams)
                step = make_predict_step(engine, pixels)
                probabilities[engine.label] = softmax(step())
            except Exception as error:  # a failing engine does not stop the others
                self.note_left_out(name, describe_error(error))
                continue
            engines[engine.label], steps[engine.label] = engine, step
        self.remove_mismatched_peers(steps, probabilities)
        if not steps:
            self.progress.report(1.0)
            return []
        share = TIMING_SHARE if self.request.starts else 1.0
        timed = time_interleaved(
            steps,
            rounds=self.request.rounds,
            seconds=self.request.seconds,
            seed=self.request.seed,
            progress=lambda done: self.progress.report(share * done),
        )
        steps.clear()
        startups = self.measure_startups({label: engines[label] for label in timed})
        self.progress.report(1.0)
        first = next(iter(timed))
        return [
            BenchLine.from_timings(
                each,
                model=self.model_files.model,
                image_size=self.model_files.size,
                batch=self.batch,
                threads=self.threads,
                way=label,
                exact=engines[label].exact,
                base=first,
                ratio=each.speedup_over(timed[first]),
                starts=startups[label],
                apart=max_difference_to_first(probabilities, label),
            )
            for label, each in timed.items()
        ]

    def list_engines(self) -> Iterator[tuple[str, int]]:
        """Names and numbers of streams; a batch that can be split is also measured with one stream per thread."""
        for name in (*self.request.peers, *(self.request.engines or self.model_files.default_engines)):
            yield name, 1
            if name in ENGINES_WITH_STREAMS and 1 < self.threads <= self.batch:
                yield name, self.threads

    def remove_mismatched_peers(
        self, steps: dict[str, Callable[[], Any]], probabilities: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """Remove peers with other probabilities: they do not run the same model."""
        ours = next((probabilities[label] for label in ("eager", "compiled", "onnx") if label in steps), None)
        for name in self.request.peers:
            if (
                ours is not None
                and name in steps
                and (difference := float(np.abs(ours - probabilities[name]).max())) > MAX_PEER_DIFFERENCE
            ):
                self.note_left_out(
                    name, f"its probabilities differ from vitrail's by up to {difference:.1g}, so it is another model"
                )
                del steps[name]

    def note_left_out(self, name: str, why: str) -> None:
        self.notes.append(
            f"{self.model_files.model} at {format_image_size(self.model_files.size)}: {name} is left out: {why}"
        )

    def measure_startups(self, engines: Mapping[str, BenchEngine]) -> dict[str, list[StartupMeasurement]]:
        """Start-up of all engines, interleaved as well."""
        measured: dict[str, list[StartupMeasurement]] = {label: [] for label in engines}
        for number in range(self.request.starts):
            for index, (label, engine) in enumerate(engines.items(), 1):
                try:
                    measured[label].append(measure_startup(engine, self.batch, self.request.imports))
                except StartupError as error:
                    self.notes.append(
                        f"{self.model_files.model} at {format_image_size(self.model_files.size)}: {error}"
                    )
                done = (number + index / len(engines)) / self.request.starts
                self.progress.report(TIMING_SHARE + (1 - TIMING_SHARE) * done)
        return measured


def max_difference_to_first(probabilities: Mapping[str, NDArray[np.float32]], label: str) -> float | None:
    """The largest difference of any probability from the first engine's."""
    return float(np.abs(probabilities[label] - next(iter(probabilities.values()))).max())


def format_quartiles(spread: MedianAndQuartiles) -> str:
    return "" if spread.low == spread.high else f"{spread.low:.2f}–{spread.high:.2f}"


def draw_benchmark(lines: Sequence[BenchLine], names: Mapping[str, str]) -> "Figure":
    """Draw one row per engine, grouped by case: images/s on the left, ratios on the right."""
    engines = list(dict.fromkeys(line.way for line in lines))
    colors = {engine: PALETTE[n % len(PALETTE)] for n, engine in enumerate(engines)}
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
            axes.plot((each.low, each.high), (position, position), color=colors[line.way], linewidth=2.2, alpha=0.55)
            axes.plot(each.median, position, "o", color=colors[line.way], markersize=6)
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
    right.axvline(1, color=GRAY, linewidth=1, zorder=0)
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
