"""How fast models answer: engines and peers in turns, by model, image size, batch and threads; memory and start-up."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError, VitrailError, describe_error, unknown_name_error
from vitrail.machine import restore_threads
from vitrail.predict.predictions import softmax
from vitrail.study.bench_engines import (
    ENGINES,
    ENGINES_WITH_STREAMS,
    PEERS,
    BenchEngine,
    ModelFiles,
    check_peers_installed,
    format_image_size,
    make_predict_step,
)
from vitrail.study.bench_results import BenchLine, BenchResults
from vitrail.study.bench_startup import StartupError, StartupMeasurement, measure_startup
from vitrail.study.timing import CallTimings, time_interleaved

MAX_PEER_DIFFERENCE = 1e-3  # probabilities of a peer with the same weights may differ by so much
PROGRESS_PARTS = 100  # that the progress of a case is told in
TIMING_SHARE = 0.7  # of a case is spent on its turns, the rest on processes that start


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What is to be measured: every combination of these."""

    models: Sequence[str]  # names, checkpoints, exported folders
    engines: Sequence[str] | None = None  # None: those that make sense for the model
    sizes: Sequence[tuple[int, int] | None] = (None,)  # None: the model's own
    batches: Sequence[int] = (1, 8)
    threads: Sequence[int] = (2,)
    peers: Sequence[str] = ()
    rounds: int | None = None  # None: as many as take about `seconds` for each way
    seconds: float = 3.0
    starts: int = 1  # processes for memory and start-up of each way; 0: not measured
    seed: int = 0
    fields: Mapping[str, Any] | None = None  # config fields that a checkpoint does not specify
    preprocessing: Mapping[str, Any] | None = None  # fields of the preprocessing to change
    imports: Sequence[str] = ()  # modules that such a process imports first

    def __post_init__(self) -> None:
        for what, given, known in (("engine", self.engines or (), ENGINES), ("peer", self.peers, PEERS)):
            for name in given:
                if name not in known:
                    raise unknown_name_error(what, name, known)
        for name, values in (("batches", self.batches), ("threads", self.threads)):
            for value in values:
                if value < 1:
                    raise ConfigError(f"--{name} {value}; expected at least 1")
        if self.starts < 0:
            raise ConfigError(f"--starts {self.starts}; expected at least 0")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}; expected at least 1")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"--seconds {self.seconds:g}; expected more than 0, and an hour at most")
        if not (self.models and self.sizes and self.batches and self.threads) or self.engines == ():
            raise ConfigError("nothing to measure; expected a model and an engine at least")

    @property
    def progress_total(self) -> int:
        """What `progress` is told in all."""
        return PROGRESS_PARTS * len(self.models) * len(self.sizes) * len(self.batches) * len(self.threads)


Progress = Callable[[int], object]


def run_benchmark(
    request: BenchRequest, *, place: Path | None = None, progress: Progress = lambda _: None
) -> BenchResults:
    """Measures all that is asked for. What cannot be measured is left out and named in the notes of the result.

    `place` is a folder for the files of each engine, by default a temporary one; `progress` is told parts as they are
    done. With nothing to show for it, it is an error.
    """
    check_peers_installed(tuple(request.peers))
    lines, notes = list[BenchLine](), list[str]()
    with folder_or_temporary(place) as folder, restore_threads():
        for number, model in enumerate(request.models):
            for size in request.sizes:
                here = folder / f"{number}-{'own' if size is None else format_image_size(size)}"
                cases = len(request.batches) * len(request.threads)
                try:
                    stock = ModelFiles(model, size, here, request.seed, request.fields, request.preprocessing)
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
                        lines += BenchCase(request, stock, batch, threads, notes, progress).measure_lines()
    if not lines:
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(notes))}")
    return BenchResults.from_lines(lines, notes=tuple(dict.fromkeys(notes)), seed=request.seed)


@contextmanager
def folder_or_temporary(place: Path | None) -> Generator[Path]:
    if place is not None:
        yield place
        return
    with TemporaryDirectory(prefix="vitrail-bench-") as folder:
        yield Path(folder)


class BenchCase:
    """All ways for one model, image size, batch and number of threads."""

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
        self.notes, self.progress, self.reported_parts = notes, progress, 0

    def measure_lines(self) -> list[BenchLine]:
        """The first, with which all are compared, is a peer's where one was asked for."""
        steps, answers = dict[str, Callable[[], Any]](), dict[str, NDArray[np.float32]]()
        ways, pixels = dict[str, BenchEngine](), self.model_files.make_pixels(self.batch, self.request.seed)
        for name, streams in self.list_engines():
            try:
                way = self.model_files.make_engine(name, self.threads, streams)
                step = make_predict_step(way, pixels)
                answers[way.label] = softmax(step())
            except Exception as error:  # an engine may fail in any way of its own, and the others go on
                self.note_left_out(name, describe_error(error))
                continue
            ways[way.label], steps[way.label] = way, step
        self.remove_mismatched_peers(steps, answers)
        if not steps:
            self.report_progress(1.0)
            return []
        share = TIMING_SHARE if self.request.starts else 1.0
        timed = time_interleaved(
            steps,
            rounds=self.request.rounds,
            seconds=self.request.seconds,
            seed=self.request.seed,
            progress=lambda done: self.report_progress(share * done),
        )
        steps.clear()
        started = self.measure_startups({label: ways[label] for label in timed})
        self.report_progress(1.0)
        first = next(iter(timed))
        return [
            self.make_line(
                ways[label], each, timed[first], first, started.get(label), max_difference_to_first(answers, label)
            )
            for label, each in timed.items()
        ]

    def list_engines(self) -> Iterator[tuple[str, int]]:
        """Names with streams; a batch that can be split is also split among the threads."""
        for name in (*self.request.peers, *(self.request.engines or self.model_files.default_engines)):
            yield name, 1
            if name in ENGINES_WITH_STREAMS and 1 < self.threads <= self.batch:
                yield name, self.threads

    def remove_mismatched_peers(
        self, steps: dict[str, Callable[[], Any]], answers: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """A peer that answers otherwise does not have the same model."""
        ours = next((answers[label] for label in ("eager", "compiled", "onnx") if label in steps), None)
        for name in self.request.peers:
            if (
                ours is not None
                and name in steps
                and (far := float(np.abs(ours - answers[name]).max())) > MAX_PEER_DIFFERENCE
            ):
                self.note_left_out(
                    name, f"its probabilities differ from ours by up to {far:.1g}, so it is another model"
                )
                del steps[name]

    def note_left_out(self, name: str, why: str) -> None:
        self.notes.append(
            f"{self.model_files.model} at {format_image_size(self.model_files.size)}: {name} is left out: {why}"
        )

    def measure_startups(self, ways: Mapping[str, BenchEngine]) -> dict[str, list[StartupMeasurement]]:
        """In turns as well."""
        found: dict[str, list[StartupMeasurement]] = {label: [] for label in ways}
        for number in range(self.request.starts):
            for place, (label, way) in enumerate(ways.items(), 1):
                try:
                    found[label].append(measure_startup(way, self.batch, self.request.imports))
                except StartupError as error:
                    self.notes.append(
                        f"{self.model_files.model} at {format_image_size(self.model_files.size)}: {error}"
                    )
                done = (number + place / len(ways)) / self.request.starts
                self.report_progress(TIMING_SHARE + (1 - TIMING_SHARE) * done)
        return found

    def report_progress(self, share: float) -> None:
        parts = int(PROGRESS_PARTS * share) - self.reported_parts
        self.reported_parts += parts
        self.progress(parts)

    def make_line(
        self,
        way: BenchEngine,
        timed: CallTimings,
        first: CallTimings,
        base: str,
        starts: list[StartupMeasurement] | None,
        apart: float | None,
    ) -> BenchLine:
        return BenchLine.from_timings(
            timed,
            model=self.model_files.model,
            image_size=self.model_files.size,
            batch=self.batch,
            threads=self.threads,
            way=way.label,
            exact=way.exact,
            base=base,
            ratio=timed.speedup_over(first),
            starts=starts or [],
            apart=apart,
        )


def max_difference_to_first(answers: Mapping[str, NDArray[np.float32]], label: str) -> float | None:
    """The largest difference in any probability to the first."""
    return float(np.abs(answers[label] - next(iter(answers.values()))).max())
