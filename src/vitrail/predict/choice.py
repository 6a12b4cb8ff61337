"""Which engine, how many streams and threads: measured once for a model, a batch and a machine, unless said."""

import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.data.framed import DEFAULT, Limits
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.shown import Shown
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.export.exported import is_exported, model_file
from vitrail.models.checks import pair
from vitrail.predict.kept import fingerprint, kept_int8, recall, remember
from vitrail.predict.predictor import BATCH, Output, Predictor, cores
from vitrail.predict.stream import Engine

EngineName = Literal["auto", "eager", "compiled", "onnx", "int8"]
WORTH_EXPORTING = 500  # pictures: for fewer, exporting a model takes longer than it saves
WORTH_MEASURING = 16  # pictures
AGREES = 0.9  # share of pictures on which int8 must say what fp32 says to be taken by --fast
SECONDS = 0.25  # that one candidate is measured for


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


def choose(model: str | Path, wish: Wish, count: int = 1, sample: Sequence[Shown] = ()) -> Chosen:
    """`count` is how many pictures there will be; `sample` are some of them, for int8 to be checked on."""
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
    predictors: dict[EngineName, Predictor] = {name: open_with(model, wish, name) for name in names}
    if wish.exact and not all(each.engine.exact for each in predictors.values()):
        raise ConfigError(f"--exact for {model}, which is in 8 bits; expected a model exported with --to onnx")
    if wish.fast:
        exact = predictors.pop("eager", None) if "onnx" in predictors else None
        name: EngineName = "onnx" if exact is not None else names[0]
        predictors = {name: in_8_bits(predictors[name], wish, sample, notes)}
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


def open_with(model: str | Path, wish: Wish, name: EngineName) -> Predictor:
    return Predictor(
        model,
        preprocessing=wish.preprocessing,
        labels=wish.labels,
        device=wish.device,
        engine=wish.engine if is_exported(model) else name,
        streams=wish.streams or 1,
        threads=wish.threads or (max(1, cores() // wish.streams) if wish.streams else None),
        output=wish.output,
        merge=wish.merge,
        limits=wish.limits,
        scaled=not wish.exact,
    )


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
    quick = Predictor(
        kept_int8(engine.place, engine.about),
        labels=exact.labels,
        streams=wish.streams or 1,
        threads=wish.threads,
        output=wish.output,
        limits=wish.limits,
        scaled=True,
    )
    shown, kind = list[Any](), "of these"
    for each in sample:
        try:
            shown.append(exact.prepared(each.source))
        except DataError:  # told when its turn comes
            continue
    if len(shown) < 8 or wish.output != "logits":
        about = quick.engine.about.agreement if hasattr(quick.engine, "about") else None  # pyright: ignore
        same, total, kind = (about or {}).get("same", 0), (about or {}).get("pictures", 0), "built-in"
    else:
        a, b = exact.engine.run(np.stack(shown)), quick.engine.run(np.stack(shown))
        same, total = int((a.argmax(-1) == b.argmax(-1)).sum()), len(shown)
    if not total or same < AGREES * total:
        notes.append(f"int8 agrees with fp32 on {same} of {total} {kind} pictures: too few, so fp32 is used")
        return exact
    notes.append(f"int8 agrees with fp32 on {same} of {total} {kind} pictures")
    return quick


def fastest(
    model: str | Path, predictors: dict[EngineName, Predictor], wish: Wish, batch: int, notes: list[str]
) -> Chosen:
    """Of the candidates the one with the most pictures a second, as measured now or before."""
    ways = {in_words(predictors[way[0]].engine.name, way): way for way in candidates(predictors, wish)}
    key = ", ".join([machine(), identity(model), f"batch {batch}", wish.output, f"merge {wish.merge}", *ways])
    known = recall(key)
    speeds: dict[str, float] = {} if known is None else known.get("images_per_second", {})
    if known is None or set(speeds) != set(ways):
        known = None
        speeds = {name: measured(with_way(predictors[way[0]], way, model, wish), batch) for name, way in ways.items()}
        remember(key, {"images_per_second": speeds, "when": time.strftime("%Y-%m-%d %H:%M")})
    best = max(ways, key=lambda name: speeds[name])
    found = with_way(predictors[ways[best][0]], ways[best], model, wish)
    told = ", ".join(f"{name} {speeds[name]:.0f}" for name in ways)
    when = "measured now" if known is None else f"measured {known.get('when', 'before')}"
    notes.append(f"engine {best}; images/s {when}: {told}")
    return Chosen(found, batch, tuple(notes))


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


def with_way(predictor: Predictor, way: Way, model: str | Path, wish: Wish) -> Predictor:
    engine = predictor.engine
    if (engine.streams, engine.threads) == way[1:]:
        return predictor
    if engine.name in ("onnx", "int8"):
        from vitrail.predict.onnx_engine import OnnxEngine

        place: Path = engine.place  # pyright: ignore[reportAttributeAccessIssue]
        predictor.engine = OnnxEngine(place, streams=way[1], threads=way[2])
        return predictor
    return open_with(model, replace(wish, streams=way[1], threads=way[2]), way[0])


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
    """Of what is measured: the file, or the folder's files; what has neither is known by its name."""
    try:
        if is_exported(model):
            return fingerprint(model_file(model))
        path = Path(model)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return " ".join(map(fingerprint, files))
    except (OSError, VitrailError):
        return str(model)
