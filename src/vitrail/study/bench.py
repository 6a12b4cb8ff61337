"""Benchmark prediction: engines and peers interleaved, by model, image size, batch and threads; memory and start-up."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, VitrailError, describe_error, unknown_name_error
from vitrail.base.machine import restore_threads
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
from vitrail.study.timing import PROGRESS_PARTS, FractionProgress, Progress, time_interleaved

MAX_PEER_DIFFERENCE = 1e-3  # in a probability, for a peer with the same weights

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


def run_benchmark(
    request: BenchRequest, *, folder: Path | None = None, progress: Progress = lambda _: None
) -> BenchResults:
    """Measure every combination; what cannot be measured is left out and listed in the notes of the results.

    `folder` is for the files of each engine, by default a temporary one. It is an error if nothing can be measured.
    """
    check_peers_installed(tuple(request.peers))
    lines, notes = list[BenchLine](), list[str]()
    with folder_or_temporary(folder) as root, restore_threads():
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
