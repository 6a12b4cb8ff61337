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

from vitrail.data.decoding.image_formats import DEFAULT_LIMITS, ImageLimits
from vitrail.data.image_items import ImageItem
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, ConfigError, DataError, VitrailError
from vitrail.export.agreement import count_agreeing_images
from vitrail.export.description import OutputKind, is_exported
from vitrail.machine import count_cores
from vitrail.models.checks import pair
from vitrail.predict.engine_cache import get_cached_int8_export, read_engine_speeds, write_engine_speeds
from vitrail.predict.model_checksums import compute_model_checksums, hash_texts
from vitrail.predict.pipeline import Engine
from vitrail.predict.predictor import DEFAULT_BATCH, Predictor

EngineName = Literal["auto", "eager", "compiled", "onnx", "int8"]
MIN_IMAGES_TO_EXPORT = 500  # pictures: for fewer, exporting a model takes longer than it saves
MIN_IMAGES_TO_MEASURE = 16  # pictures
MIN_INT8_AGREEMENT = 0.9  # share of pictures on which int8 must say what fp32 says to be taken by --fast
MIN_SAMPLE_IMAGES = 8  # pictures of the job that tell whether it does; else the built-in ones do
MIN_GAIN = 1.05  # times as fast must a call on more threads be
MEASURING_SECONDS = 0.25  # that one candidate is measured for


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What is asked for; what is None is chosen."""

    engine: EngineName = "auto"
    exact: bool = False  # nothing but what equals fp32 within 1e-4
    fast: bool = False  # int8 too, where it agrees
    batch: int | None = None
    streams: int | None = None
    threads: int | None = None
    output: OutputKind = "logits"
    merge: int = 0
    labels: Sequence[str] | None = None
    preprocessing: Preprocessing | None = None
    limits: ImageLimits = DEFAULT_LIMITS
    device: str = "cpu"
    fields: Mapping[str, Any] | None = None  # config fields that the file does not specify

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("streams", self.streams), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` {value}; expected 1 or more", (name,))
        if self.merge < 0:
            raise ConfigError(f"`merge` {self.merge}; expected 0 or more tokens to merge in each layer", ("merge",))
        if self.exact and (self.fast or self.engine == "int8"):
            other = "`fast`" if self.fast else "`engine` int8"
            raise ConfigError(f"`exact` with {other}, which is not exact; use one of them", ("exact", "fast", "engine"))


@dataclass(frozen=True)
class EngineChoice:
    predictor: Predictor
    batch: int
    notes: tuple[str, ...]  # for the user: what was chosen, and what decided it


def choose_engine(
    model: str | Path,
    options: EngineOptions,
    count: int = 1,
    sample: Sequence[ImageItem] = (),
    notify: Callable[[str], object] = lambda _: None,
) -> EngineChoice:
    """`count` is how many pictures there will be; `sample` are some of them, for int8 to be checked on.

    What takes a while is told before it begins.
    """
    batch, notes = min(options.batch or DEFAULT_BATCH, max(count, 1)), list[str]()
    if is_exported(model):
        names: list[EngineName] = ["auto"]
    elif options.engine != "auto":
        names = [options.engine]
    else:
        names = ["eager"]
        if options.device in ("cpu", "auto") and (count >= MIN_IMAGES_TO_EXPORT or options.fast):
            names.append("onnx")
        elif count > 1:
            notes.append(
                f"engine eager: for {count} pictures exporting the model would take longer than it saves; "
                "for many calls: vitrail export"
            )
    if not is_exported(model) and options.engine == "auto" and count >= MIN_IMAGES_TO_MEASURE:
        notes.append("engine compiled was not tried, for compiling takes half a minute: --engine compiled")
    if not is_exported(model) and options.device == "auto":
        options = replace(options, device=choose_device())
    if "onnx" in names or "int8" in names:
        notify(
            f"engine {names[-1]}: the model is exported first, unless an export of it was kept; half a minute or less"
        )
    predictors = open_predictors(model, options, names, notes)
    if options.exact and not all(each.engine.exact for each in predictors.values()):
        raise ConfigError(f"--exact for {model}, which is in 8 bits; expected a model exported with --to onnx")
    if options.fast and len(predictors) == len(names):
        quick: dict[EngineName, Predictor] = {names[-1]: try_int8(predictors[names[-1]], options, sample, notes)}
        predictors = quick
    fixed = (
        options.streams is not None
        or options.threads is not None
        or count < MIN_IMAGES_TO_MEASURE
        or count_cores() == 1
    )
    if fixed and len(predictors) == 1:
        found = next(iter(predictors.values()))
        if options.engine == "auto" and count < MIN_IMAGES_TO_MEASURE and not notes:
            notes.append(f"engine {found.engine.name}: nothing measured for {count} picture{'s' * (count > 1)}")
        return EngineChoice(found, batch, tuple(notes))
    return choose_fastest_engine(model, predictors, options, batch, notes)


def choose_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_predictors(
    model: str | Path, options: EngineOptions, names: Sequence[EngineName], notes: list[str]
) -> dict[EngineName, Predictor]:
    """The first, and of the others those that this machine can have."""
    found: dict[EngineName, Predictor] = {names[0]: open_predictor(model, options, names[0])}
    for name in names[1:]:
        try:
            found[name] = open_predictor(model, options, name)
        except VitrailError as error:  # a full disk, a package that is missing, a model that has no export
            notes.append(f"engine {name} was left out: {error}")
    return found


def open_predictor(model: str | Path, options: EngineOptions, name: EngineName) -> Predictor:
    return Predictor(
        model,
        preprocessing=options.preprocessing,
        labels=options.labels,
        device=options.device,
        engine=options.engine if is_exported(model) else name,
        streams=options.streams or 1,
        threads=count_threads_per_stream(options),
        output=options.output,
        merge=options.merge,
        limits=options.limits,
        scaled=not options.exact,
        fields=options.fields,
    )


def count_threads_per_stream(options: EngineOptions) -> int | None:
    """Of each stream, where they are said or follow from how many streams there are."""
    return options.threads or (max(1, count_cores() // options.streams) if options.streams else None)


def try_int8(exact: Predictor, options: EngineOptions, sample: Sequence[ImageItem], notes: list[str]) -> Predictor:
    """The model in 8 bits, if it says the same of enough pictures; and the figure, for the user."""
    engine: Any = exact.engine
    if engine.name == "int8":
        seen = engine.description.agreement
        notes.append(
            "int8: never compared with fp32"
            if not seen
            else f"int8 agreed with fp32 on {seen['same']} of {seen['pictures']} pictures when it was exported"
        )
        return exact
    if engine.name != "onnx":
        raise ConfigError(f"--fast with --engine {engine.name}; expected auto, onnx or int8")
    exact.engine.run(make_blank_image(exact))  # with its time limit, since the quantiser runs the graph, too
    settled = replace(options, engine="auto", merge=0, fields=None)  # an export specifies its model completely
    try:
        try:
            quick = open_predictor(get_cached_int8_export(engine.export_path, engine.description), settled, "auto")
        except CheckpointError:  # the cached model is damaged
            quick = open_predictor(
                get_cached_int8_export(engine.export_path, engine.description, rebuild=True), settled, "auto"
            )
    except VitrailError as error:
        notes.append(f"engine int8 was left out: {error}")
        return exact
    quick.labels, quick.preprocessing = exact.labels, exact.preprocessing
    seen = quick.engine.description.agreement or {}  # pyright: ignore[reportAttributeAccessIssue]
    same, total, kind = seen.get("same", 0), seen.get("pictures", 0), "built-in"
    shown = list[Any]()
    for each in sample:
        try:
            shown.append(exact.prepare_image(each.source))
        except DataError:  # told when its turn comes
            continue
    if len(shown) >= MIN_SAMPLE_IMAGES:
        pixels = np.stack(shown)
        same = count_agreeing_images(quick.engine.run(pixels), exact.engine.run(pixels), options.output)
        total, kind = len(shown), "of these"
    if not total or same < MIN_INT8_AGREEMENT * total:
        notes.append(f"int8 agrees with fp32 on {same} of {total} {kind} pictures: too few, so fp32 is used")
        return exact
    notes.append(f"int8 agrees with fp32 on {same} of {total} {kind} pictures")
    return quick


def make_blank_image(predictor: Predictor) -> NDArray[np.uint8]:
    """One black image, as input of the engine: (1, rows, columns, C)."""
    how = predictor.preprocessing
    return np.zeros((1, *pair(how.image_size), len(how.mean)), np.uint8)


def choose_fastest_setting(settings: Mapping[str, "EngineSetting"], speeds: Mapping[str, float]) -> str:
    """The fastest; of two alike the one with fewer threads per call, which wait for each other on a busy machine."""
    enough = max(speeds[name] for name in settings) / MIN_GAIN
    return min((each[2], -speeds[name], name) for name, each in settings.items() if speeds[name] >= enough)[-1]


def choose_fastest_engine(
    model: str | Path, predictors: dict[EngineName, Predictor], options: EngineOptions, batch: int, notes: list[str]
) -> EngineChoice:
    """Of the candidates the one with the most pictures a second, as measured now or before."""
    ways = {
        format_engine_setting(predictors[way[0]].engine.name, way): way
        for way in list_engine_settings(predictors, options)
    }
    key = ", ".join(
        [
            describe_machine(),
            compute_model_key(model),
            f"batch {batch}",
            options.output,
            f"merge {options.merge}",
            *ways,
        ]
    )
    known = read_engine_speeds(key)
    speeds: Any = None if known is None else known.get("images_per_second")
    if known is None or not is_speed_table(speeds, ways):
        known = None
        speeds = {
            name: measure_images_per_second(apply_engine_setting(predictors[way[0]], way), batch)
            for name, way in ways.items()
        }
        write_engine_speeds(key, {"images_per_second": speeds, "when": time.strftime("%Y-%m-%d %H:%M")})
    best = choose_fastest_setting(ways, speeds)
    found = apply_engine_setting(predictors[ways[best][0]], ways[best])
    told = ", ".join(f"{name} {speeds[name]:.0f}" for name in ways)
    when = "measured now" if known is None else f"measured {known.get('when', 'before')}"
    notes.append(f"engine {best}; images/s {when}: {told}")
    return EngineChoice(found, batch, tuple(notes))


def is_speed_table(speeds: Any, settings: Iterable[str]) -> bool:
    """Of what was kept: a number for each way, or it is no use."""
    return isinstance(speeds, dict) and all(isinstance(speeds.get(name), int | float) for name in settings)


EngineSetting = tuple[EngineName, int, int]  # the engine, its streams, the threads of each


def list_engine_settings(predictors: dict[EngineName, Predictor], options: EngineOptions) -> list[EngineSetting]:
    """One call on all cores, or a call for each core; what is fixed is kept."""
    have = count_cores()
    pairs = {(options.streams or 1, options.threads or have), (options.streams or have, options.threads or 1)}
    if options.streams and not options.threads:
        pairs = {(options.streams, max(1, have // options.streams))}
    return [
        (name, streams, threads)
        for name, each in predictors.items()
        for streams, threads in sorted(pairs)
        if each.engine.name != "compiled" or streams == 1  # which is not to be called by two at once
    ]


def apply_engine_setting(predictor: Predictor, setting: EngineSetting) -> Predictor:
    """The same predictor, its engine with these streams and threads."""
    engine: Any = predictor.engine
    if (engine.streams, engine.threads) == setting[1:]:
        return predictor
    if engine.name in ("onnx", "int8"):
        from vitrail.predict.onnx_engine import OnnxEngine

        predictor.engine = OnnxEngine(engine.export_path, streams=setting[1], threads=setting[2])
    else:  # the model is as it was
        other = copy(engine)
        other.streams, other.threads = setting[1:]
        predictor.engine = other
    return predictor


def format_engine_setting(name: str, setting: EngineSetting) -> str:
    """As "onnx 2×1": two streams of one thread each."""
    return f"{name} {setting[1]}×{setting[2]}"


def measure_images_per_second(predictor: Predictor, batch: int) -> float:
    """Pictures a second, with all its streams at work."""
    engine: Engine = predictor.engine
    size, channels = pair(predictor.preprocessing.image_size), len(predictor.preprocessing.mean)
    one = np.random.default_rng(0).integers(0, 256, (1, *size, channels), dtype=np.uint8)
    engine.run(one)
    start = time.perf_counter()
    engine.run(one)
    took = time.perf_counter() - start
    many = np.repeat(one, max(1, min(batch, int(MEASURING_SECONDS / took))), 0)
    with ThreadPoolExecutor(engine.streams) as pool:
        list(pool.map(engine.run, [one] * engine.streams))
        start, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - start < MEASURING_SECONDS:
            list(pool.map(engine.run, [many] * engine.streams))
            done += engine.streams * len(many)
        return done / (time.perf_counter() - start)


def describe_machine() -> str:
    """What a measurement holds for."""
    import platform  # slow to import, and a single photo needs no measurement

    kind = platform.processor() or platform.machine()
    for line in read_cpuinfo_lines():
        if line.startswith("model name"):
            kind = line.split(":", 1)[1].strip()
            break
    return f"{kind}, {count_cores()} cores"


def read_cpuinfo_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def compute_model_key(model: str | Path) -> str:
    """Identifies a model by the contents of its files, or by its name if it has none."""
    try:
        found = compute_model_checksums(model)
    except (OSError, VitrailError):
        found = []
    return hash_texts(*found) if found else str(model)
