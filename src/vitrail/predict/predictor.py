"""Predict the classes of images, or compute their features, with any engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, VitrailError, unknown_name_error
from vitrail.base.machine import count_cores
from vitrail.base.progress import Progress, track_progress
from vitrail.data.images.decoding.image_formats import DEFAULT_LIMITS, ImageLimits
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import TensorLike
from vitrail.data.images.image_items import ImageItem
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.export.description import OUTPUT_KINDS, OutputKind
from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import Size, check_count, find_image_config, pair
from vitrail.opening import GivenPreprocessing, Opened, open_model
from vitrail.predict.pipeline import Engine, ImageResult, PrepareImage, run_pipeline
from vitrail.predict.predictions import Prediction, predictions_from_logits

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT_BATCH = 8  # images
EngineName = Literal["auto", "eager", "compiled", "bfloat16", "onnx", "int8"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)
FeatureKind = Literal["class", "mean", "tokens"]
FEATURES = "features"  # as an output: the kind that the head of the model reads


class Predictor:
    """Predicts the classes of photos, or computes their features.

    `model` is a name, a path, a module or what `vitrail.open_model` returned. `engine`: eager or compiled torch, or
    torch in bfloat16; onnx or int8, which export the model once to a cache; auto is onnx for an exported model and
    eager otherwise. `output` is logits, or for a model without a head features: what its head would read.
    `image_size`, `preprocessing`, `labels`, `device`, `fields` and `trust_code` are those of `vitrail.open_model`.

    >>> predictor = vitrail.Predictor("vit_fashion")
    >>> photo = vitrail.open_data("fashion").val.source(9)
    >>> predictor.predict(photo).top[0].label
    'Ankle boot'
    >>> predictor.features(photo).shape
    (64,)
    """

    def __init__(
        self,
        model: "str | Path | nn.Module | Opened",
        *,
        image_size: Size | None = None,
        preprocessing: GivenPreprocessing = None,
        labels: Sequence[str] | Literal["imagenet"] | None = None,
        device: "str | torch.device | None" = None,
        engine: EngineName = "auto",
        streams: int = 1,
        threads: int | None = None,
        output: OutputKind | Literal["features"] | None = None,
        merge: int = 0,
        limits: ImageLimits = DEFAULT_LIMITS,
        scaled: bool = False,
        fields: Mapping[str, Any] | None = None,
        trust_code: str | Sequence[str] = (),
    ) -> None:
        if engine not in ENGINE_NAMES:
            raise unknown_name_error("engine", engine, ENGINE_NAMES)
        if output not in (None, FEATURES, *OUTPUT_KINDS):
            raise unknown_name_error("output", output, (FEATURES, *OUTPUT_KINDS))
        for name, count in (("streams", streams), ("threads", 1 if threads is None else threads)):
            check_count(name, count)
        if not isinstance(limits, ImageLimits):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"`limits` is {limits!r}; expected ImageLimits(pixels=…, bytes=…)")
        self.limits, self.scaled, self.merge = limits, scaled, merge
        self.loaded = open_model(
            model,
            kind="image",
            image_size=image_size,
            fields=fields,
            preprocessing=preprocessing,
            labels=labels,
            device=device,
            threads=threads,
            trust_code=trust_code,
        )
        self.preprocessing, self.labels = self.loaded.preprocessing, self.loaded.labels
        self.classes = self.loaded.classes
        self.output: OutputKind = (
            choose_features(self.loaded) if output == FEATURES else output or choose_output(self.loaded)
        )
        self.model: Any = None  # the module, if torch runs it
        if not isinstance(self.loaded.model, ExportedModel) and engine not in ("onnx", "int8"):
            self.model = self.loaded.model
            if merge != 0:
                from vitrail.models.parts.token_merging import add_token_merging

                self.model = add_token_merging(self.model, merge)
        self.engine: Engine = open_engine(self, self.output, engine, streams, threads)
        self.feature_engines: dict[OutputKind, Engine] = {}

    def __repr__(self) -> str:
        return f"Predictor({self.loaded!r}, engine {self.engine.name}, output {self.output})"

    def predict(self, image: Any, top: int = 5) -> Prediction:
        """The top classes of an image: a path, bytes, a Pillow image, an array or a tensor.

        >>> photo = vitrail.open_data("fashion").val.source(9)
        >>> print(vitrail.Predictor("vit_fashion").predict(photo, top=2))
        79.0%  Ankle boot
        13.5%  Sneaker
        """
        check_count("top", top)
        check_output_is_logits(self)
        return self.prediction_from_logits(self.engine.run(np.stack([self.prepare_image(image)]))[0], top)

    def predict_all(
        self, images: Iterable[Any], batch: int = DEFAULT_BATCH, top: int = 5, *, progress: Progress = None
    ) -> Iterator[Prediction]:
        """One prediction per image, in order, a few batches ahead; an unreadable image is a DataError.

        By default, a progress bar is shown in a notebook and on a terminal.

        >>> predictor = vitrail.Predictor("vit_fashion")
        >>> [len(each.top) for each in predictor.predict_all(["example:cat", "example:rocket"], top=3)]
        [3, 3]
        """
        check_count("top", top)
        check_output_is_logits(self)
        rows = iterate_values(self.engine, self.prepare_image, images, batch, progress)
        return (self.prediction_from_logits(values, top) for values in rows)

    def features(self, image: Any, kind: FeatureKind | None = None) -> NDArray[np.float32]:
        """The features of an image after the last norm: (D,).

        `kind` is "class" for the class token, "mean" for the mean of the patch tokens, or "tokens" for all tokens,
        (N, D); by default "class" if the head reads the class token, else "mean".

        >>> predictor = vitrail.Predictor("vit_fashion")
        >>> predictor.features("example:cat", "tokens").shape  # the class token and 4×4 patches
        (17, 64)
        """
        values = get_feature_engine(self, kind).run(np.stack([self.prepare_image(image)]))[0]
        if not np.isfinite(values).all():
            raise VitrailError(NOT_FINITE_MESSAGE)
        return values

    def features_all(
        self,
        images: Iterable[Any],
        kind: FeatureKind | None = None,
        batch: int = DEFAULT_BATCH,
        *,
        progress: Progress = None,
    ) -> NDArray[np.float32]:
        """The features of all images as one array: (images, D), or (images, N, D) for tokens.

        >>> vitrail.Predictor("vit_fashion").features_all(["example:cat", "example:rocket"]).shape
        (2, 64)
        """
        engine = get_feature_engine(self, kind)
        rows = [*iterate_values(engine, self.prepare_image, images, batch, progress)]
        if not rows:
            raise ConfigError("there are no images; expected at least one")
        return np.stack(rows)

    def feature_maps(self, image: Any) -> list[NDArray[np.float32]]:
        """The feature maps of an image, one per level, from the finest to the coarsest: [(D, h, w), …].

        >>> [each.shape for each in vitrail.Predictor("vit_fashion").feature_maps("example:cat")]
        [(64, 4, 4)]
        """
        values = get_output_engine(self, "maps").run(np.stack([self.prepare_image(image)]))
        return [each[0] for each in unflatten_maps_by_level(values, compute_map_shapes(self))]

    def iterate_results(self, images: Iterable[ImageItem], batch: int = DEFAULT_BATCH) -> Iterator[ImageResult]:
        """The engine's output for each image, in order; an unreadable image has its error instead."""
        return run_pipeline(self.engine, images, self.prepare_image, batch)

    def prepare_image(self, image: Any) -> NDArray[np.uint8]:
        """The engine's input for an image: (rows, columns, C)."""
        return decode_for_model(image, self.preprocessing, self.limits, reduce_jpeg=self.scaled)

    def prediction_from_logits(self, logits: NDArray[np.float32], top: int) -> Prediction:
        return predictions_from_logits(logits[None], self.labels, top)[0]


def open_engine(
    predictor: Predictor, output: OutputKind, engine: EngineName, streams: int, threads: int | None
) -> Engine:
    """The engine that computes an output of the model."""
    if isinstance(predictor.loaded.model, ExportedModel):
        check_export_matches(predictor.loaded.model, engine, output, predictor.merge)
        found = copy(predictor.loaded.model)  # shares the session
        found.streams = streams
        return found
    if engine in ("onnx", "int8"):
        return open_cached_export(predictor.loaded, engine, output, predictor.merge, streams, threads or count_cores())
    from vitrail.predict.torch_engine import TorchEngine

    name = engine if engine in ("compiled", "bfloat16") else "eager"
    return TorchEngine(predictor.model, predictor.preprocessing, output, name=name, streams=streams, threads=threads)


def get_feature_engine(predictor: Predictor, kind: FeatureKind | None) -> Engine:
    """The engine that computes one kind of features."""
    if kind is not None and kind not in get_args(FeatureKind):
        raise unknown_name_error("kind of features", kind, get_args(FeatureKind))
    return get_output_engine(
        predictor, kind or (predictor.output if predictor.output != "logits" else choose_features(predictor.loaded))
    )


def get_output_engine(predictor: Predictor, output: OutputKind) -> Engine:
    """The engine that computes an output, opened once."""
    if output == predictor.output:
        return predictor.engine
    if output not in predictor.feature_engines:
        name: Any = predictor.engine.name
        predictor.feature_engines[output] = open_engine(
            predictor, output, name, predictor.engine.streams, predictor.engine.threads
        )
    return predictor.feature_engines[output]


def compute_map_shapes(predictor: Predictor) -> list[tuple[int, ...]]:
    """The shape of the feature map of each level, (D, h, w), for images of the preprocessing's size."""
    import torch

    from vitrail.models.base.contract import unwrap_compiled

    model, how = predictor.loaded.model, predictor.preprocessing
    if isinstance(model, ExportedModel):
        raise exported_maps_error(model.path)
    blank = torch.zeros(1, len(how.mean), *pair(how.image_size), device=next(model.parameters()).device)
    with torch.inference_mode():
        return [tuple(each.shape[1:]) for each in unwrap_compiled(model).feature_maps(blank)]


def unflatten_maps_by_level(
    values: NDArray[np.float32], shapes: Sequence[tuple[int, ...]]
) -> list[NDArray[np.float32]]:
    """The output `maps` of an engine, a vector per image, as one array per level: [(B, D, h, w), …]."""
    ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
    return [part.reshape(-1, *shape) for part, shape in zip(np.split(values, ends, axis=1), shapes, strict=True)]


def iterate_values(
    engine: Engine, prepare: PrepareImage, images: Iterable[Any], batch: int, progress: Progress
) -> Iterator[NDArray[np.float32]]:
    """The engine's output for each image; the arguments are checked at once."""
    check_count("batch", batch)
    # the rows of a single array would be taken for gray images
    one = isinstance(images, str | bytes | Path) or (isinstance(images, np.ndarray | TensorLike) and images.ndim < 4)
    if one or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"images is one {type(images).__name__}; expected several in a list")
    items = (ImageItem(each, str(each) if isinstance(each, str | Path) else "") for each in images)
    total = len(images) if isinstance(images, Sized) else None

    def iterate() -> Iterator[NDArray[np.float32]]:
        with track_progress(progress, total, "images") as advance:
            for row in run_pipeline(engine, items, prepare, batch):
                if row.values is None:
                    raise row.error or ConfigError("an image has neither values nor an error")
                yield row.values
                advance(1)

    return iterate()


def check_output_is_logits(predictor: Predictor) -> None:
    if predictor.output == "logits":
        return
    if not predictor.classes:
        raise ConfigError(
            f"{predictor.loaded.source} has no head, so it has no classes; use features() or fine-tune it"
        )
    raise ConfigError(f"the predictor computes features, {predictor.output}; expected output='logits' for classes")


def choose_output(loaded: Opened) -> OutputKind:
    """What an export returns; otherwise logits, or features if the model has no head."""
    if isinstance(loaded.model, ExportedModel):
        return loaded.model.description.output
    return "logits" if loaded.classes else choose_features(loaded)


def choose_features(loaded: Opened) -> OutputKind:
    """What the head reads: the class token, or the mean of the patch tokens; of an export, the features it returns."""
    if isinstance(loaded.model, ExportedModel):
        output = loaded.model.description.output
        return "class" if output == "logits" else output  # an export of logits has no features, which is an error
    from vitrail.models.base.contract import find_image_model

    declared = find_image_model(loaded.model)
    return "class" if declared is not None and declared.classifier_tokens else "mean"


def exported_maps_error(path: Path) -> ConfigError:
    return ConfigError(f"`maps` of {path}, which is exported; expected the model that it was exported from")


def check_export_matches(exported: ExportedModel, engine: EngineName, output: OutputKind, merge: int) -> None:
    """Refuse an export that was written for another use."""
    place, about = exported.path, exported.description
    if engine not in ("auto", exported.name):
        raise ConfigError(
            f"`engine` {engine} for {place}, which is exported; expected {exported.name} or auto", ("engine",)
        )
    if output == "maps":
        raise exported_maps_error(place)
    if about.output != output:
        how = "without `features`" if output == "logits" else f"with `features` {output}"
        raise ConfigError(f"{place} returns {about.output}; expected {output}: export the model {how}", ("features",))
    if merge not in (0, about.merge):
        raise ConfigError(
            f"`merge` {merge} for {place}, which was exported with `merge` {about.merge}; export the model again",
            ("merge",),
        )


def open_cached_export(
    loaded: Opened, engine: Literal["onnx", "int8"], output: OutputKind, merge: int, streams: int, threads: int
) -> ExportedModel:
    """The model on ONNX Runtime, from an export in the cache."""
    from vitrail.predict.engine_cache import export_cache_path, open_or_write_export, write_cached_export

    if loaded.checkpoint is None and find_image_config(loaded.model) is None:
        raise ConfigError(f"`engine` {engine} for {loaded.source}, which cannot be exported; use eager")
    about: Any = {"merge": merge, "precision": "int8" if engine == "int8" else "fp32"}
    return open_or_write_export(
        export_cache_path(loaded, output, **about),
        lambda path: write_cached_export(loaded, path, output, **about),
        partial(ExportedModel, streams=streams, threads=threads),
    )
