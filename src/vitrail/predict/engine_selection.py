"""Choose the engine, streams and threads. Speeds are measured once per model, batch and machine, and cached."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError, VitrailError, describe_error
from vitrail.base.machine import count_cores, describe_machine, find_bfloat16_instructions
from vitrail.data.images.decoding.image_formats import DEFAULT_LIMITS, ImageLimits
from vitrail.data.images.image_items import ImageItem, evenly_spaced_indices
from vitrail.export.agreement import count_agreeing_images, make_photo_crops
from vitrail.export.description import OutputKind, is_exported
from vitrail.export.exported_model import ExportedModel
from vitrail.export.onnx_session import open_for_one_image
from vitrail.models.base.checks import pair
from vitrail.opening import GivenPreprocessing, Opened, download_if_missing, open_model
from vitrail.predict.engine_cache import (
    is_export_cached,
    lock_engine_speeds,
    open_cached_int8_export,
    read_engine_speeds,
    write_engine_speeds,
)
from vitrail.predict.model_checksums import compute_model_key
from vitrail.predict.pipeline import Engine
from vitrail.predict.predictor import DEFAULT_BATCH, EngineName, Predictor, open_engine

if TYPE_CHECKING:
    from vitrail.data.images.datasets import ImageDataset

MIN_IMAGES_TO_EXPORT = 500  # for fewer, exporting a model takes longer than it saves
MIN_SECONDS_TO_EXPORT = 25.0  # of the images in torch: exporting takes ten or more, and saves about half of them
ENGINE_SAMPLE_SIZE = 32  # images of the job on which engines are compared
MIN_IMAGES_TO_MEASURE = 16
MIN_AGREEMENT = 0.9  # share of images with the same top class as fp32, for `fast` to use int8 or bfloat16
MIN_SAMPLE_IMAGES = 8  # images of the job needed to measure that share; otherwise the built-in photos are used
MIN_GAIN = 1.05  # a call on more threads must be this many times as fast
BUILT_IN_VIEWS = 32  # crops of the built-in photos
INEXACT_ENGINES = ("int8", "bfloat16")
TIMED_RUNS = 5  # at most
BLANK_IMAGES = 2  # to estimate how long a job takes
MEASURING_SECONDS = 0.25  # per candidate
MIN_SECONDS_TO_CHOOSE = 5.0  # of labeled images in torch; fewer are done before engines are compared


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run a model; None means automatic."""

    engine: EngineName = "auto"
    exact: bool = False  # only engines within 1e-4 of fp32
    fast: bool = False  # int8 and bfloat16 as well, if they agree with fp32
    batch: int | None = None
    streams: int | None = None
    threads: int | None = None
    output: OutputKind | Literal["features"] = "logits"  # features: what the head of the model reads
    merge: int = 0
    labels: Sequence[str] | None = None
    preprocessing: GivenPreprocessing = None
    limits: ImageLimits = DEFAULT_LIMITS
    device: str = "cpu"
    fields: Mapping[str, Any] | None = None  # config fields that the checkpoint does not specify

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("streams", self.streams), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` {value}; expected 1 or more")
        if self.merge < 0:
            raise ConfigError(f"`merge` {self.merge}; expected 0 or more tokens to merge in each layer")
        inexact = self.engine in INEXACT_ENGINES
        if self.exact and (self.fast or inexact):
            other = "`fast`" if self.fast else f"`engine` {self.engine}"
            raise ConfigError(f"`exact` with {other}, which is not exact; use one of them")
        if self.output == "maps" and (self.fast or inexact or self.merge):
            other = "`merge`" if self.merge else "`fast`" if self.fast else f"`engine` {self.engine}"
            raise ConfigError(f"`maps` with {other}; expected every token, computed in float32: leave it out")


@dataclass(frozen=True)
class EngineChoice:
    predictor: Predictor
    batch: int
    notes: tuple[str, ...]  # for the user: what was chosen and why


def open_on_fastest_engine(
    model: str | Path | Opened,
    options: EngineOptions,
    count: int = 1,
    sample: Sequence[ImageItem] = (),
    notify: Callable[[str], object] = lambda _: None,
) -> EngineChoice:
    """Open the model on the fastest engine for `count` images.

    `sample` are some of these images, on which int8 and bfloat16 are compared with fp32. `notify` is called before slow
    work.
    """
    batch, notes = min(options.batch or DEFAULT_BATCH, max(count, 1)), list[str]()
    if isinstance(model, Opened):
        opened = model
    else:
        download_if_missing(model)
        if options.device == "auto" and not is_exported(model):
            options = replace(options, device=choose_device())
        with open_for_one_image() if count == 1 else nullcontext():
            opened = open_model(
                model,
                kind="image",
                fields=options.fields,
                preprocessing=options.preprocessing,
                labels=options.labels,
                device=options.device,
                threads=count_threads_per_stream(options),
            )
    automatic = options.engine == "auto" and not isinstance(opened.model, ExportedModel)
    first = open_predictor(opened, options, "eager" if automatic else options.engine)
    predictors: dict[EngineName, Predictor] = {"eager" if automatic else options.engine: first}
    if automatic and count >= MIN_IMAGES_TO_MEASURE:
        notes.append("engine compiled was not tried, since compiling takes half a minute")
    if automatic and (options.fast or is_worth_exporting(first, options, count, notes)):
        predictors |= open_export(opened, options, notes, notify)
    if options.exact and not first.engine.exact:
        raise ConfigError(f"`exact` for {opened.source}, which is int8; expected a model exported to onnx")
    if options.fast:
        exact, inexact = [*predictors.values()][-1], dict[EngineName, Predictor]()
        if not automatic or "onnx" in predictors:
            inexact |= open_int8_if_accurate(exact, options, sample, notes)
        inexact |= open_bfloat16_if_accurate(first, exact, options, sample, notes)
        measured = count >= MIN_IMAGES_TO_MEASURE
        predictors = predictors | inexact if measured or not inexact else inexact
    fixed = (
        options.streams is not None
        or options.threads is not None
        or count < MIN_IMAGES_TO_MEASURE
        or count_cores() == 1
    )
    if fixed and len(predictors) == 1:
        if options.engine == "auto" and 1 < count < MIN_IMAGES_TO_MEASURE and not notes:
            notes.append(f"engine {first.engine.name}: nothing measured for {count} images")
        return EngineChoice(next(iter(predictors.values())), batch, tuple(notes))
    return choose_fastest_engine(opened.source, predictors, options, batch, notes)


def choose_engine_for_dataset(loaded: Opened, dataset: "ImageDataset", options: EngineOptions) -> EngineChoice | None:
    """The fastest engine for labeled images; None for torch, if the images take a few seconds or another device."""
    given = options.exact or options.fast or options.streams or options.threads
    if options.engine == "auto" and not given:
        short = options.device != "cpu" or estimate_seconds(Predictor(loaded), len(dataset)) < MIN_SECONDS_TO_CHOOSE
        if short:
            return None
    chosen = evenly_spaced_indices(len(dataset), ENGINE_SAMPLE_SIZE)
    sample = [ImageItem(dataset.source(n), dataset.name(n)) for n in chosen]
    return open_on_fastest_engine(loaded, options, len(dataset), sample)


def is_worth_exporting(predictor: Predictor, options: EngineOptions, count: int, notes: list[str]) -> bool:
    """Whether exporting the model saves more time than it takes, or was done before; if not, a note says why."""
    if count < 2 or options.device not in ("cpu", "auto"):
        return False
    loaded, about = predictor.loaded, f"{count} images"
    if count >= MIN_IMAGES_TO_EXPORT:
        seconds = estimate_seconds(predictor, count)
        if seconds >= MIN_SECONDS_TO_EXPORT or is_export_cached(loaded, predictor.output, options.merge):
            return True
        about = f"{count:,} images, which take about {seconds:.0f} s in torch,"
    notes.append(
        f"engine eager: for {about} exporting the model would take longer than it saves; for many calls: vitrail export"
    )
    return False


def estimate_seconds(predictor: Predictor, count: int) -> float:
    """How long the engine takes for this many images: the fastest of a few runs, since others may interrupt."""
    blank = np.repeat(make_blank_image(predictor), BLANK_IMAGES, 0)
    predictor.engine.run(blank)  # fills caches
    taken = list[float]()
    while len(taken) < TIMED_RUNS and sum(taken) < 1:
        start = time.perf_counter()
        predictor.engine.run(blank)
        taken.append(time.perf_counter() - start)
    return min(taken) * count / BLANK_IMAGES


def open_export(
    opened: Opened, options: EngineOptions, notes: list[str], notify: Callable[[str], object]
) -> dict[EngineName, Predictor]:
    """The model in ONNX Runtime, if that works on this machine."""
    notify("engine onnx: exporting the model, unless an export is cached; this may take half a minute")
    try:
        return {"onnx": open_predictor(opened, options, "onnx")}
    except (VitrailError, OSError) as error:  # a full or unreadable disk, a missing package, a model without export
        notes.append(f"engine onnx was left out: {describe_error(error)}")
        return {}


def choose_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_predictor(opened: Opened, options: EngineOptions, name: EngineName) -> Predictor:
    return Predictor(
        opened,
        engine=name,
        streams=options.streams or 1,
        threads=count_threads_per_stream(options),
        output=options.output,
        merge=options.merge,
        limits=options.limits,
        scaled=not options.exact,
    )


def count_threads_per_stream(options: EngineOptions) -> int | None:
    """The threads of each stream, if they are given or follow from the number of streams."""
    return options.threads or (max(1, count_cores() // options.streams) if options.streams else None)


def open_int8_if_accurate(
    exact: Predictor, options: EngineOptions, sample: Sequence[ImageItem], notes: list[str]
) -> dict[EngineName, Predictor]:
    """The model in int8, if it agrees with fp32 on enough images; the share goes into the notes."""
    engine = exact.engine
    if not isinstance(engine, ExportedModel):
        raise ConfigError(f"`fast` with `engine` {engine.name}; expected auto, onnx or int8")
    if engine.name == "int8":
        seen = engine.description.agreement
        notes.append(
            "int8 was never compared with fp32"
            if not seen
            else f"int8 agreed with fp32 on {seen['same']} of {seen['pictures']} images when it was exported"
        )
        return {}
    engine.run(make_blank_image(exact))  # with its time limit, since the quantizer runs the graph, too
    settled = replace(options, engine="auto", merge=0, fields=None)  # an export specifies its model completely
    try:
        quick = open_cached_int8_export(
            engine, lambda path: open_predictor(open_model(path, kind="image"), settled, "auto")
        )
    except (VitrailError, OSError) as error:
        notes.append(f"engine int8 was left out: {describe_error(error)}")
        return {}
    quick.labels, quick.preprocessing = exact.labels, exact.preprocessing
    assert isinstance(quick.engine, ExportedModel)
    seen = quick.engine.description.agreement or {}
    same, total, kind = seen.get("same", 0), seen.get("pictures", 0), "built-in images"
    if (pixels := prepare_sample(exact, sample)) is not None:
        same = count_agreeing_images(quick.engine.run(pixels), engine.run(pixels), options.output)
        total, kind = len(pixels), "of these images"
    return {"int8": quick} if is_accurate("int8", same, total, kind, notes) else {}


def open_bfloat16_if_accurate(
    eager: Predictor, exact: Predictor, options: EngineOptions, sample: Sequence[ImageItem], notes: list[str]
) -> dict[EngineName, Predictor]:
    """The model in bfloat16, if this CPU has instructions for it and it agrees with fp32 on enough images."""
    if eager.engine.name != "eager" or options.device != "cpu" or not find_bfloat16_instructions():
        return {}
    quick = copy(eager)
    quick.engine = open_engine(quick, quick.output, "bfloat16", options.streams or 1, count_threads_per_stream(options))
    quick.feature_engines = {}
    pixels, kind = prepare_sample(exact, sample), "of these images"
    if pixels is None:
        pixels, kind = make_photo_crops(BUILT_IN_VIEWS, exact.preprocessing), "built-in images"
    same = count_agreeing_images(quick.engine.run(pixels), exact.engine.run(pixels), options.output)
    return {"bfloat16": quick} if is_accurate("bfloat16", same, len(pixels), kind, notes) else {}


def prepare_sample(predictor: Predictor, sample: Sequence[ImageItem]) -> NDArray[np.uint8] | None:
    """The readable images of a sample as input of the engine; None if they are too few."""
    prepared = list[NDArray[np.uint8]]()
    for each in sample:
        with suppress(DataError):  # reported when the image is processed
            prepared.append(predictor.prepare_image(each.source))
    return np.stack(prepared) if len(prepared) >= MIN_SAMPLE_IMAGES else None


def is_accurate(name: str, same: int, total: int, kind: str, notes: list[str]) -> bool:
    """Whether an engine agrees with fp32 on enough images; the share goes into the notes."""
    enough = total > 0 and same >= MIN_AGREEMENT * total
    notes.append(f"{name} agrees with fp32 on {same} of {total} {kind}{'' if enough else ': too few, so fp32 is used'}")
    return enough


def make_blank_image(predictor: Predictor) -> NDArray[np.uint8]:
    """One black image, as input of the engine: (1, rows, columns, C)."""
    how = predictor.preprocessing
    return np.zeros((1, *pair(how.image_size), len(how.mean)), np.uint8)


def choose_fastest_setting(settings: Mapping[str, "EngineSetting"], speeds: Mapping[str, float]) -> str:
    """The fastest; if two are similar, the one with fewer threads per call, since threads wait for each other."""
    enough = max(speeds[name] for name in settings) / MIN_GAIN
    return min((each[2], -speeds[name], name) for name, each in settings.items() if speeds[name] >= enough)[-1]


def choose_fastest_engine(
    model: str, predictors: dict[EngineName, Predictor], options: EngineOptions, batch: int, notes: list[str]
) -> EngineChoice:
    """The candidate with the most images per second, as measured now or before."""
    settings = {
        format_engine_setting(predictors[each[0]].engine.name, each): each
        for each in list_engine_settings(predictors, options)
    }
    model_key = compute_model_key(model)
    key = ", ".join(
        [describe_machine(), model_key, f"batch {batch}", options.output, f"merge {options.merge}", *settings]
    )
    known = read_known_speeds(key, settings)
    with nullcontext() if known else lock_engine_speeds(key):
        known = known or read_known_speeds(key, settings)  # another process may have measured them
        speeds: dict[str, float] = (known or {}).get("images_per_second") or {
            name: measure_images_per_second(apply_engine_setting(predictors[each[0]], each), batch)
            for name, each in settings.items()
        }
        if known is None:
            write_engine_speeds(key, {"images_per_second": speeds, "when": time.strftime("%Y-%m-%d %H:%M")})
    best = choose_fastest_setting(settings, speeds)
    found = apply_engine_setting(predictors[settings[best][0]], settings[best])
    listed = ", ".join(f"{name} {speeds[name]:.0f}" for name in settings)
    when = "measured now" if known is None else f"measured {known.get('when', 'before')}"
    notes.append(f"engine {best}; images/s {when}: {listed}")
    return EngineChoice(found, batch, tuple(notes))


def read_known_speeds(key: str, settings: Iterable[str]) -> dict[str, Any] | None:
    """The cached speeds, if they have a number for each setting."""
    known = read_engine_speeds(key)
    speeds: Any = (known or {}).get("images_per_second")
    complete = isinstance(speeds, dict) and all(isinstance(speeds.get(name), int | float) for name in settings)
    return known if complete else None


EngineSetting = tuple[EngineName, int, int]  # engine, streams, threads per stream


def list_engine_settings(predictors: dict[EngineName, Predictor], options: EngineOptions) -> list[EngineSetting]:
    """One stream on all cores, or one stream per core; streams and threads that were given stay."""
    have = count_cores()
    pairs = {(options.streams or 1, options.threads or have), (options.streams or have, options.threads or 1)}
    if options.streams and not options.threads:
        pairs = {(options.streams, max(1, have // options.streams))}
    return [
        (name, streams, threads)
        for name, each in predictors.items()
        for streams, threads in sorted(pairs)
        if each.engine.name != "compiled" or streams == 1  # a compiled model cannot be called by two threads at once
    ]


def apply_engine_setting(predictor: Predictor, setting: EngineSetting) -> Predictor:
    """The same predictor, with an engine of these streams and threads."""
    engine: Any = predictor.engine
    if (engine.streams, engine.threads) != setting[1:]:
        if isinstance(engine, ExportedModel):
            predictor.engine = engine.with_threads(*setting[1:])
        else:  # shares the model
            predictor.engine = engine = copy(engine)
            engine.streams, engine.threads = setting[1:]
    return predictor


def format_engine_setting(name: str, setting: EngineSetting) -> str:
    """For instance "onnx 2×1": two streams of one thread each."""
    return f"{name} {setting[1]}×{setting[2]}"


def measure_images_per_second(predictor: Predictor, batch: int) -> float:
    """Images per second with all streams busy."""
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
