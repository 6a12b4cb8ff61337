"""How fast models answer: engines and peers in turns, by model, image size, batch and threads; memory and start-up."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError, VitrailError, one_line, unknown
from vitrail.machine import restore_threads
from vitrail.predict.answers import softmax
from vitrail.study.bench_results import Line, Results
from vitrail.study.cold import Start, StartError, start
from vitrail.study.contenders import ENGINES, PEERS, STREAMS, Stock, Way, check_peers, shown, step_of
from vitrail.study.turns import Timed, in_turns

SAME = 1e-3  # probabilities of a peer with the same weights may differ by so much
PARTS = 100  # that the progress of a case is told in
AFTER = 0.7  # of a case is spent on its turns, the rest on processes that start


@dataclass(frozen=True, kw_only=True)
class Request:
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
    imports: Sequence[str] = ()  # modules that such a process imports first

    def __post_init__(self) -> None:
        for what, given, known in (("engine", self.engines or (), ENGINES), ("peer", self.peers, PEERS)):
            for name in given:
                if name not in known:
                    raise unknown(what, name, known)
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
    def parts(self) -> int:
        """What `progress` is told in all."""
        return PARTS * len(self.models) * len(self.sizes) * len(self.batches) * len(self.threads)


Progress = Callable[[int], object]


def bench(request: Request, *, place: Path | None = None, progress: Progress = lambda _: None) -> Results:
    """Measures all that is asked for. What cannot be measured is left out and named in the notes of the result.

    `place` is a folder for the files of each engine, by default a temporary one; `progress` is told parts as they are
    done. With nothing to show for it, it is an error.
    """
    check_peers(tuple(request.peers))
    lines, notes = list[Line](), list[str]()
    with kept(place) as folder, restore_threads():
        for number, model in enumerate(request.models):
            for size in request.sizes:
                here = folder / f"{number}-{'own' if size is None else shown(size)}"
                cases = len(request.batches) * len(request.threads)
                try:
                    stock = Stock(model, size, here, request.seed, request.fields)
                except VitrailError as error:
                    if len(request.models) * len(request.sizes) == 1:
                        raise
                    notes.append(f"{model}{'' if size is None else f' at {shown(size)}'} is left out: {error}")
                    progress(PARTS * cases)
                    continue
                for threads in request.threads:
                    for batch in request.batches:
                        lines += Case(request, stock, batch, threads, notes, progress).lines()
    if not lines:
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(notes))}")
    return Results.of(lines, notes=tuple(dict.fromkeys(notes)), seed=request.seed)


@contextmanager
def kept(place: Path | None) -> Generator[Path]:
    if place is not None:
        yield place
        return
    with TemporaryDirectory(prefix="vitrail-bench-") as folder:
        yield Path(folder)


class Case:
    """All ways for one model, image size, batch and number of threads."""

    def __init__(
        self,
        request: Request,
        stock: Stock,
        batch: int,
        threads: int,
        notes: list[str],
        progress: Progress = lambda _: None,
    ) -> None:
        self.request, self.stock, self.batch, self.threads = request, stock, batch, threads
        self.notes, self.progress, self.told = notes, progress, 0

    def lines(self) -> list[Line]:
        """The first, with which all are compared, is a peer's where one was asked for."""
        steps, answers = dict[str, Callable[[], Any]](), dict[str, NDArray[np.float32]]()
        ways, pixels = dict[str, Way](), self.stock.pixels(self.batch, self.request.seed)
        for name, streams in self.wanted():
            try:
                way = self.stock.way(name, self.threads, streams)
                step = step_of(way, pixels)
                answers[way.label] = softmax(step())
            except Exception as error:  # an engine may fail in any way of its own, and the others go on
                self.left_out(name, one_line(error))
                continue
            ways[way.label], steps[way.label] = way, step
        self.without_strangers(steps, answers)
        if not steps:
            self.tell(1.0)
            return []
        share = AFTER if self.request.starts else 1.0
        timed = in_turns(
            steps,
            rounds=self.request.rounds,
            seconds=self.request.seconds,
            seed=self.request.seed,
            progress=lambda done: self.tell(share * done),
        )
        steps.clear()
        started = self.started({label: ways[label] for label in timed})
        self.tell(1.0)
        first = next(iter(timed))
        return [
            self.line(ways[label], each, timed[first], first, started.get(label), apart(answers, label))
            for label, each in timed.items()
        ]

    def wanted(self) -> Iterator[tuple[str, int]]:
        """Names with streams; a batch that can be split is also split among the threads."""
        for name in (*self.request.peers, *(self.request.engines or self.stock.engines)):
            yield name, 1
            if name in STREAMS and 1 < self.threads <= self.batch:
                yield name, self.threads

    def without_strangers(
        self, steps: dict[str, Callable[[], Any]], answers: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """A peer that answers otherwise does not have the same model."""
        ours = next((answers[label] for label in ("eager", "compiled", "onnx") if label in steps), None)
        for name in self.request.peers:
            if ours is not None and name in steps and (far := float(np.abs(ours - answers[name]).max())) > SAME:
                self.left_out(name, f"its probabilities differ from ours by up to {far:.1g}, so it is another model")
                del steps[name]

    def left_out(self, name: str, why: str) -> None:
        self.notes.append(f"{self.stock.model} at {shown(self.stock.size)}: {name} is left out: {why}")

    def started(self, ways: Mapping[str, Way]) -> dict[str, list[Start]]:
        """In turns as well."""
        found: dict[str, list[Start]] = {label: [] for label in ways}
        for number in range(self.request.starts):
            for place, (label, way) in enumerate(ways.items(), 1):
                try:
                    found[label].append(start(way, self.batch, self.request.imports))
                except StartError as error:
                    self.notes.append(f"{self.stock.model} at {shown(self.stock.size)}: {error}")
                done = (number + place / len(ways)) / self.request.starts
                self.tell(AFTER + (1 - AFTER) * done)
        return found

    def tell(self, share: float) -> None:
        parts = int(PARTS * share) - self.told
        self.told += parts
        self.progress(parts)

    def line(
        self, way: Way, timed: Timed, first: Timed, base: str, starts: list[Start] | None, apart: float | None
    ) -> Line:
        return Line.of(
            timed,
            model=self.stock.model,
            image_size=self.stock.size,
            batch=self.batch,
            threads=self.threads,
            way=way.label,
            exact=way.exact,
            base=base,
            ratio=timed.times_as_fast_as(first),
            starts=starts or [],
            apart=apart,
        )


def apart(answers: Mapping[str, NDArray[np.float32]], label: str) -> float | None:
    """The largest difference in any probability to the first."""
    return float(np.abs(answers[label] - next(iter(answers.values()))).max())
