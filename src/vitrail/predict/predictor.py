"""Predict the classes of images, or compute their features, with any engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.data.decoding.image_formats import DEFAULT_LIMITS, ImageLimits
from vitrail.data.decoding.model_input import decode_for_model
from vitrail.data.image_items import ImageItem
from vitrail.errors import CheckpointError, ConfigError
from vitrail.export.description import OutputKind
from vitrail.export.exported_model import ExportedModel
from vitrail.loading import GivenPreprocessing, LoadedModel, open_model
from vitrail.machine import count_cores
from vitrail.predict.pipeline import Engine, ImageResult, run_pipeline
from vitrail.predict.predictions import Prediction, predictions_from_logits

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT_BATCH = 8  # images
EngineName = Literal["auto", "eager", "compiled", "onnx", "int8"]


class Predictor:
    """A model with its preprocessing and labels, and an engine that runs it.

    `model` is anything that `vitrail.loading.open_model` takes: a name, a path, a module or a LoadedModel. `engine`:
    eager or compiled torch; onnx or int8, which export the model once to a cache; auto is onnx for an exported model
    and eager otherwise. `fields` are config fields that a checkpoint does not specify, such as heads.
    """

    def __init__(
        self,
        model: "str | Path | nn.Module | LoadedModel",
        *,
        preprocessing: GivenPreprocessing = None,
        labels: Sequence[str] | None = None,
        device: "str | torch.device" = "cpu",
        engine: EngineName = "auto",
        streams: int = 1,
        threads: int | None = None,
        output: OutputKind = "logits",
        merge: int = 0,
        limits: ImageLimits = DEFAULT_LIMITS,
        scaled: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits, self.scaled, self.output = limits, scaled, output
        loaded = open_model(
            model, fields=fields, preprocessing=preprocessing, labels=labels, device=device, threads=threads
        )
        self.preprocessing, self.labels, self.classes = loaded.preprocessing, loaded.labels, loaded.classes
        self.model: Any = None  # the module, if torch runs it
        self.engine: Engine
        if isinstance(loaded.model, ExportedModel):
            check_export_matches(loaded.model, engine, output, merge)
            self.engine = loaded.model
            self.engine.streams = streams
        elif engine in ("onnx", "int8"):
            self.engine = open_cached_export(loaded, engine, output, merge, streams, threads or count_cores())
        else:
            from vitrail.models.token_merging import add_token_merging
            from vitrail.predict.torch_engine import TorchEngine

            self.model = add_token_merging(loaded.model, merge)
            self.engine = TorchEngine(
                self.model,
                self.preprocessing,
                output,
                name="compiled" if engine == "compiled" else "eager",
                streams=streams,
                threads=threads,
            )

    def predict(self, image: Any, top: int = 5) -> Prediction:
        """The top classes of an image of any kind that `vitrail.data.decoding.rgb_image.open_image` takes."""
        check_positive_integer("top", top)
        self.check_output_is_logits()
        return self.prediction_from_logits(self.engine.run(np.stack([self.prepare_image(image)]))[0], top)

    def predict_all(self, images: Iterable[Any], batch: int = DEFAULT_BATCH, top: int = 5) -> Iterator[Prediction]:
        """One prediction per image, in order, a few batches ahead; an unreadable image is a DataError."""
        check_positive_integer("batch", batch)
        check_positive_integer("top", top)
        self.check_output_is_logits()
        # the rows of a single array would be taken for grey images
        one = isinstance(images, str | bytes | Path) or getattr(images, "ndim", 4) < 4
        if one or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"images is one {type(images).__name__}; expected several: a list, or predict for one")
        items = (ImageItem(each, str(each) if isinstance(each, str | Path) else "") for each in images)
        return self.iterate_predictions(self.iterate_results(items, batch), top)

    def iterate_predictions(self, results: Iterable[ImageResult], top: int) -> Iterator[Prediction]:
        for row in results:
            if row.values is None:
                raise row.error or ConfigError("an image has neither values nor an error")
            yield self.prediction_from_logits(row.values, top)

    def iterate_results(self, images: Iterable[ImageItem], batch: int = DEFAULT_BATCH) -> Iterator[ImageResult]:
        """The engine's output for each image, in order; an unreadable image has its error instead."""
        return run_pipeline(self.engine, images, self.prepare_image, batch)

    def prepare_image(self, image: Any) -> NDArray[np.uint8]:
        """The engine's input for an image: (rows, columns, C)."""
        return decode_for_model(image, self.preprocessing, self.limits, reduce_jpeg=self.scaled)

    def prediction_from_logits(self, logits: NDArray[np.float32], top: int) -> Prediction:
        return predictions_from_logits(logits[None], self.labels, top)[0]

    def check_output_is_logits(self) -> None:
        if self.output != "logits":
            raise ConfigError(f"the predictor computes features, {self.output}; expected output='logits' for classes")


def check_export_matches(exported: ExportedModel, engine: EngineName, output: OutputKind, merge: int) -> None:
    """Refuse an export that was written for another use."""
    place, about = exported.path, exported.description
    if engine not in ("auto", exported.name):
        raise ConfigError(
            f"`engine` {engine} for {place}, which is exported; expected {exported.name} or auto", ("engine",)
        )
    if about.output != output:
        how = "without `features`" if output == "logits" else f"with `features` {output}"
        raise ConfigError(f"{place} returns {about.output}; expected {output}: export the model {how}", ("features",))
    if merge not in (0, about.merge):
        raise ConfigError(
            f"`merge` {merge} for {place}, which was exported with `merge` {about.merge}; export the model again",
            ("merge",),
        )


def open_cached_export(
    loaded: LoadedModel, engine: Literal["onnx", "int8"], output: OutputKind, merge: int, streams: int, threads: int
) -> ExportedModel:
    """The model on ONNX Runtime, from an export in the cache; a damaged one is written again."""
    from vitrail.predict.engine_cache import get_or_write_cached_export

    if loaded.checkpoint is None and not hasattr(loaded.model, "config"):
        raise ConfigError(f"`engine` {engine} for {loaded.source}, which cannot be exported; use eager", ("engine",))
    get = partial(
        get_or_write_cached_export, loaded, output, merge=merge, precision="int8" if engine == "int8" else "fp32"
    )
    try:
        return ExportedModel(get(), streams=streams, threads=threads)
    except CheckpointError:
        return ExportedModel(get(rebuild=True), streams=streams, threads=threads)


def check_positive_integer(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
