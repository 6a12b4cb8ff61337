"""Which engine, how many streams and threads: measured once for a model, a batch and a machine, unless said."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image_formats import DEFAULT, Limits
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.shown import Shown
from vitrail.errors import CheckpointError, ConfigError, DataError, VitrailError
from vitrail.export.agreement import agreeing
from vitrail.export.exported import Output, is_exported
from vitrail.machine import cores
from vitrail.models.checks import pair
from vitrail.predict.identity import contents_of, short_key
from vitrail.predict.kept import kept_int8, recall, remember
from vitrail.predict.predictor import BATCH, Predictor
from vitrail.predict.stream import Engine

EngineName = Literal["auto", "eager", "compiled", "onnx", "int8"]
WORTH_EXPORTING = 500  # pictures: for fewer, exporting a model takes longer than it saves
WORTH_MEASURING = 16  # pictures
AGREES = 0.9  # share of pictures on which int8 must say what fp32 says to be taken by --fast
FEWEST = 8  # pictures of the job that tell whether it does; else the built-in ones do
SECONDS = 0.25  # that one candidate is measured for
GAIN = 1.05  # times as fast must a call on more threads be


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for; what is None is chosen."""

    engine: EngineName = "auto"
    exact: bool = False  # nothing but what equals fp32 within 1e-4
    fast: bool = False  # int8 too, where it agrees
    batch: int | None = None
    streams: int | None = None
    threads: int | None = None
    output: Output = "logits"
    merge: int = 0
    labels: Sequence[str] | None = None
    preprocessing: Preprocessing | None = None
    limits: Limits = DEFAULT
    device: str = "cpu"
    fields: Mapping[str, Any] | None = None  # config fields that the file does not specify

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("streams", self.streams), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}; expected 1 or more")
        if self.merge < 0:
            raise ConfigError(f"merge {self.merge}; expected 0 or more")
        if self.exact and (self.fast or self.engine == "int8"):
            other = "fast" if self.fast else "engine int8"
            raise ConfigError(f"exact and {other} at once; expected one: int8 is not exact")


@dataclass(frozen=True)
class Chosen:
    predictor: Predictor
    batch: int
    notes: tuple[str, ...]  # for the user: what was chosen, and what decided it


def choose(
    model: str | Path,
    wish: Wish,
    count: int = 1,
    sample: Sequence[Shown] = (),
    tell: Callable[[str], object] = lambda _: None,
) -> Chosen:
    """`count` is how many pictures there will be; `sample` are some of them, for int8 to be checked on.

    What takes a while is told before it begins.
    """
    batch, notes = min(wish.batch or BATCH, max(count, 1)), list[str]()
    if is_exported(model):
        names: list[EngineName] = ["auto"]
    elif wish.engine != "auto":
        names = [wish.engine]
    else:
        names = ["eager"]
        if wish.device in ("cpu", "auto") and (count >= WORTH_EXPORTING or wish.fast):
            names.append("onnx")
        elif count > 1:
            notes.append(
                f"engine eager: for {count} pictures exporting the model would take longer than it saves; "
                "for many calls: vitrail export"
            )
    if not is_exported(model) and wish.engine == "auto" and count >= WORTH_MEASURING:
        notes.append("engine compiled was not tried, for compiling takes half a minute: --engine compiled")
    if not is_exported(model) and wish.device == "auto":
        wish = replace(wish, device=likely_device())
    if "onnx" in names or "int8" in names:
        tell(f"engine {names[-1]}: the model is exported first, unless an export of it was kept; half a minute or less")
    predictors = opened(model, wish, names, notes)
    if wish.exact and not all(each.engine.exact for each in predictors.values()):
        raise ConfigError(f"--exact for {model}, which is in 8 bits; expected a model exported with --to onnx")
    if wish.fast and len(predictors) == len(names):
        quick: dict[EngineName, Predictor] = {names[-1]: in_8_bits(predictors[names[-1]], wish, sample, notes)}
        predictors = quick
    fixed = wish.streams is not None or wish.threads is not None or count < WORTH_MEASURING or cores() == 1
    if fixed and len(predictors) == 1:
        found = next(iter(predictors.values()))
        if wish.engine == "auto" and count < WORTH_MEASURING and not notes:
            notes.append(f"engine {found.engine.name}: nothing measured for {count} picture{'s' * (count > 1)}")
        return Chosen(found, batch, tuple(notes))
    return fastest(model, predictors, wish, batch, notes)


def likely_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def opened(model: str | Path, wish: Wish, names: Sequence[EngineName], notes: list[str]) -> dict[EngineName, Predictor]:
    """The first, and of the others those that this machine can have."""
    found: dict[EngineName, Predictor] = {names[0]: open_with(model, wish, names[0])}
    for name in names[1:]:
        try:
            found[name] = open_with(model, wish, name)
        except VitrailError as error:  # a full disk, a package that is missing, a model that has no export
            notes.append(f"engine {name} was left out: {error}")
    return found


def open_with(model: str | Path, wish: Wish, name: EngineName) -> Predictor:
    return Predictor(
        model,
        preprocessing=wish.preprocessing,
        labels=wish.labels,
        device=wish.device,
        engine=wish.engine if is_exported(model) else name,
        streams=wish.streams or 1,
        threads=threads_of(wish),
        output=wish.output,
        merge=wish.merge,
        limits=wish.limits,
        scaled=not wish.exact,
        fields=wish.fields,
    )


def threads_of(wish: Wish) -> int | None:
    """Of each stream, where they are said or follow from how many streams there are."""
    return wish.threads or (max(1, cores() // wish.streams) if wish.streams else None)


def in_8_bits(exact: Predictor, wish: Wish, sample: Sequence[Shown], notes: list[str]) -> Predictor:
    """The model in 8 bits, if it says the same of enough pictures; and the figure, for the user."""
    engine: Any = exact.engine
    if engine.name == "int8":
        seen = engine.about.agreement
        notes.append(
            "int8: never compared with fp32"
            if not seen
            else f"int8 agreed with fp32 on {seen['same']} of {seen['pictures']} pictures when it was exported"
        )
        return exact
    if engine.name != "onnx":
        raise ConfigError(f"--fast with --engine {engine.name}; expected auto, onnx or int8")
    exact.engine.run(blank_image(exact))  # with its time limit, since the quantiser runs the graph, too
    settled = replace(wish, engine="auto", merge=0, fields=None)  # an export specifies its model completely
    try:
        try:
            quick = open_with(kept_int8(engine.place, engine.about), settled, "auto")
        except CheckpointError:  # the cached model is damaged
            quick = open_with(kept_int8(engine.place, engine.about, rebuild=True), settled, "auto")
    except VitrailError as error:
        notes.append(f"engine int8 was left out: {error}")
        return exact
    quick.labels, quick.preprocessing = exact.labels, exact.preprocessing
    seen = quick.engine.about.agreement or {}  # pyright: ignore[reportAttributeAccessIssue]
    same, total, kind = seen.get("same", 0), seen.get("pictures", 0), "built-in"
    shown = list[Any]()
    for each in sample:
        try:
            shown.append(exact.prepared(each.source))
        except DataError:  # told when its turn comes
            continue
    if len(shown) >= FEWEST:
        pixels = np.stack(shown)
        same = agreeing(quick.engine.run(pixels), exact.engine.run(pixels), wish.output)
        total, kind = len(shown), "of these"
    if not total or same < AGREES * total:
        notes.append(f"int8 agrees with fp32 on {same} of {total} {kind} pictures: too few, so fp32 is used")
        return exact
    notes.append(f"int8 agrees with fp32 on {same} of {total} {kind} pictures")
    return quick


def blank_image(predictor: Predictor) -> NDArray[np.uint8]:
    """One black image, as input of the engine: (1, rows, columns, C)."""
    how = predictor.preprocessing
    return np.zeros((1, *pair(how.image_size), len(how.mean)), np.uint8)


def fastest(
    model: str | Path, predictors: dict[EngineName, Predictor], wish: Wish, batch: int, notes: list[str]
) -> Chosen:
    """Of the candidates the one with the most pictures a second, as measured now or before."""
    ways = {in_words(predictors[way[0]].engine.name, way): way for way in candidates(predictors, wish)}
    key = ", ".join([machine(), identity(model), f"batch {batch}", wish.output, f"merge {wish.merge}", *ways])
    known = recall(key)
    speeds: Any = None if known is None else known.get("images_per_second")
    if known is None or not is_table(speeds, ways):
        known = None
        speeds = {name: measured(with_way(predictors[way[0]], way), batch) for name, way in ways.items()}
        remember(key, {"images_per_second": speeds, "when": time.strftime("%Y-%m-%d %H:%M")})
    best = best_way(ways, speeds)
    found = with_way(predictors[ways[best][0]], ways[best])
    told = ", ".join(f"{name} {speeds[name]:.0f}" for name in ways)
    when = "measured now" if known is None else f"measured {known.get('when', 'before')}"
    notes.append(f"engine {best}; images/s {when}: {told}")
    return Chosen(found, batch, tuple(notes))


def best_way(ways: Mapping[str, "Way"], speeds: Mapping[str, float]) -> str:
    """The fastest; of two alike the one with fewer threads a call: they wait for each other on a busy machine."""
    enough = max(speeds[name] for name in ways) / GAIN
    return min((way[2], -speeds[name], name) for name, way in ways.items() if speeds[name] >= enough)[-1]


def is_table(speeds: Any, ways: Iterable[str]) -> bool:
    """Of what was kept: a number for each way, or it is no use."""
    return isinstance(speeds, dict) and all(isinstance(speeds.get(name), int | float) for name in ways)


Way = tuple[EngineName, int, int]  # the engine, its streams, the threads of each


def candidates(predictors: dict[EngineName, Predictor], wish: Wish) -> list[Way]:
    """One call on all cores, or a call for each core; what is fixed is kept."""
    have = cores()
    pairs = {(wish.streams or 1, wish.threads or have), (wish.streams or have, wish.threads or 1)}
    if wish.streams and not wish.threads:
        pairs = {(wish.streams, max(1, have // wish.streams))}
    return [
        (name, streams, threads)
        for name, each in predictors.items()
        for streams, threads in sorted(pairs)
        if each.engine.name != "compiled" or streams == 1  # which is not to be called by two at once
    ]


def with_way(predictor: Predictor, way: Way) -> Predictor:
    """The same predictor, its engine with these streams and threads."""
    engine: Any = predictor.engine
    if (engine.streams, engine.threads) == way[1:]:
        return predictor
    if engine.name in ("onnx", "int8"):
        from vitrail.predict.onnx_engine import OnnxEngine

        predictor.engine = OnnxEngine(engine.place, streams=way[1], threads=way[2])
    else:  # the model is as it was
        other = copy(engine)
        other.streams, other.threads = way[1:]
        predictor.engine = other
    return predictor


def in_words(name: str, way: Way) -> str:
    """As "onnx 2×1": two streams of one thread each."""
    return f"{name} {way[1]}×{way[2]}"


def measured(predictor: Predictor, batch: int) -> float:
    """Pictures a second, with all its streams at work."""
    engine: Engine = predictor.engine
    size, channels = pair(predictor.preprocessing.image_size), len(predictor.preprocessing.mean)
    one = np.random.default_rng(0).integers(0, 256, (1, *size, channels), dtype=np.uint8)
    engine.run(one)
    start = time.perf_counter()
    engine.run(one)
    took = time.perf_counter() - start
    many = np.repeat(one, max(1, min(batch, int(SECONDS / took))), 0)
    with ThreadPoolExecutor(engine.streams) as pool:
        list(pool.map(engine.run, [one] * engine.streams))
        start, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - start < SECONDS:
            list(pool.map(engine.run, [many] * engine.streams))
            done += engine.streams * len(many)
        return done / (time.perf_counter() - start)


def machine() -> str:
    """What a measurement holds for."""
    import platform  # slow to import, and a single photo needs no measurement

    kind = platform.processor() or platform.machine()
    for line in cpu_lines():
        if line.startswith("model name"):
            kind = line.split(":", 1)[1].strip()
            break
    return f"{kind}, {cores()} cores"


def cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def identity(model: str | Path) -> str:
    """Identifies a model by the contents of its files, or by its name if it has none."""
    try:
        found = contents_of(model)
    except (OSError, VitrailError):
        found = []
    return short_key(*found) if found else str(model)
