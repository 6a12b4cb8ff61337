"""From pictures to the likeliest classes, or to features, by whichever engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.data.decoding.image_formats import DEFAULT_LIMITS, ImageLimits
from vitrail.data.decoding.model_input import decode_for_model
from vitrail.data.image_items import ImageItem
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, ConfigError
from vitrail.export.description import ExportDescription, OutputKind, is_exported
from vitrail.machine import count_cores
from vitrail.models.checks import pair
from vitrail.predict.pipeline import Engine, ImageResult, run_pipeline
from vitrail.predict.predictions import Prediction, check_class_labels, predictions_from_logits

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT_BATCH = 8  # pictures at once, unless said
ENGINE_PRECISIONS: dict[str, Literal["fp32", "int8"]] = {
    "onnx": "fp32",
    "int8": "int8",
}  # of the engines that are exports


class Predictor:
    """A model, its preprocessing, its class names and what computes it, in one.

    `model` is a module, anything that `vitrail.load` takes, or what `vitrail export` wrote, which needs no torch.
    `engine`: eager or compiled torch; onnx or int8, which export the model once and keep it; auto is onnx for an
    exported model and eager for any other. `fields` are config fields that a file does not specify, such as heads.
    """

    def __init__(
        self,
        model: "str | Path | nn.Module",
        *,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | None = None,
        device: "str | torch.device" = "cpu",
        engine: Literal["auto", "eager", "compiled", "onnx", "int8"] = "auto",
        streams: int = 1,
        threads: int | None = None,
        output: OutputKind = "logits",
        merge: int = 0,
        limits: ImageLimits = DEFAULT_LIMITS,
        scaled: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits, self.scaled, self.output = limits, scaled, output
        self.model: Any = None  # the module, where it is torch that computes
        self.engine: Engine
        if isinstance(model, str | Path) and is_exported(model):
            if fields:
                raise ConfigError(
                    f"{min(fields)} was given for {model}, which is exported and complete; expected no fields"
                )
            self.open_exported(model, preprocessing, labels, engine, streams, threads, merge)
            return
        from vitrail.predict.viewer import Viewer

        viewer = Viewer(model, preprocessing=preprocessing, labels=labels, device=device, fields=fields)
        self.preprocessing, self.labels, self.classes = viewer.preprocessing, viewer.labels, viewer.classes
        if engine in ("onnx", "int8"):
            from vitrail.predict.engine_cache import get_cached_export

            keep = partial(get_cached_export, viewer, output, merge=merge, precision=ENGINE_PRECISIONS[engine])
            settled = (preprocessing, self.labels, engine, streams, threads, merge)
            try:
                self.open_exported(keep(), *settled)
            except CheckpointError:  # damaged since it was written
                self.open_exported(keep(rebuild=True), *settled)
            return
        from vitrail.models.token_merging import add_token_merging
        from vitrail.predict.torch_engine import TorchEngine

        self.model = add_token_merging(viewer.model, merge)
        name = "compiled" if engine == "compiled" else "eager"
        self.engine = TorchEngine(self.model, self.preprocessing, output, name=name, streams=streams, threads=threads)

    def open_exported(
        self,
        place: str | Path,
        preprocessing: Preprocessing | None,
        labels: Sequence[str] | None,
        engine: str,
        streams: int,
        threads: int | None,
        merge: int,
    ) -> None:
        from vitrail.predict.onnx_engine import OnnxEngine

        found = OnnxEngine(place, streams=streams, threads=threads or count_cores())
        about = found.description
        if engine not in ("auto", found.name):
            raise ConfigError(f"engine {engine!r} for {place}, which is exported; expected {found.name} or auto")
        if about.output != self.output:
            given = f"{place} answers with {about.output}"
            how = "without --features" if self.output == "logits" else f"with --features {self.output}"
            raise ConfigError(f"{given}; expected {self.output}: export the model {how}")
        if about.merge != merge and merge:
            raise ConfigError(
                f"merge {merge} for {place}, exported with {about.merge}; expected: export --merge {merge}"
            )
        if preprocessing is not None and (preprocessing.mean, preprocessing.std) != (
            about.preprocessing.mean,
            about.preprocessing.std,
        ):
            raise ConfigError(f"another mean or std than {place} was exported with; expected the same: export it again")
        self.engine, self.preprocessing, self.classes = found, adapt_preprocessing(preprocessing, about), about.classes
        self.labels = about.labels if labels is None else check_class_labels(labels, self.classes)

    def predict(self, image: Any, top: int = 5) -> Prediction:
        """The likeliest classes of one picture, of any kind that `vitrail.data.decoding.rgb_image.open_image` takes."""
        check_positive_integer("top", top)
        self.check_output_is_logits()
        return self.prediction_from_logits(self.engine.run(np.stack([self.prepare_image(image)]))[0], top)

    def predict_all(self, images: Iterable[Any], batch: int = DEFAULT_BATCH, top: int = 5) -> Iterator[Prediction]:
        """One prediction a picture, in order, a few batches ahead; a picture that cannot be read is a DataError."""
        check_positive_integer("batch", batch)
        check_positive_integer("top", top)
        self.check_output_is_logits()
        # the rows of one array would pass for grey pictures
        one = isinstance(images, str | bytes | Path) or getattr(images, "ndim", 4) < 4
        if one or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"images is one {type(images).__name__}; expected several: a list, or predict for one")
        shown = (ImageItem(each, str(each) if isinstance(each, str | Path) else "") for each in images)
        return self.iterate_predictions(self.iterate_results(shown, batch), top)

    def iterate_predictions(self, results: Iterable[ImageResult], top: int) -> Iterator[Prediction]:
        for row in results:
            if row.values is None:
                raise row.error or ConfigError("a picture without an answer")
            yield self.prediction_from_logits(row.values, top)

    def iterate_results(self, images: Iterable[ImageItem], batch: int = DEFAULT_BATCH) -> Iterator[ImageResult]:
        """The engine's numbers for each picture, in order; for one that cannot be read why, and the others go on."""
        return run_pipeline(self.engine, images, self.prepare_image, batch)

    def prepare_image(self, image: Any) -> NDArray[np.uint8]:
        """What the engine sees of a picture: (rows, columns, C)."""
        return decode_for_model(image, self.preprocessing, self.limits, reduce_jpeg=self.scaled)

    def prediction_from_logits(self, logits: NDArray[np.float32], top: int) -> Prediction:
        return predictions_from_logits(logits[None], self.labels, top)[0]

    def check_output_is_logits(self) -> None:
        if self.output != "logits":
            raise ConfigError(f"the predictor gives features, {self.output}; expected output='logits' for classes")


def adapt_preprocessing(given: Preprocessing | None, about: ExportDescription) -> Preprocessing:
    """What is asked for, at a size that the file takes."""
    if given is None:
        return about.preprocessing
    if about.multiple == 0:
        return replace(given, image_size=about.preprocessing.image_size)
    rows, columns = pair(given.image_size)
    if rows % about.multiple or columns % about.multiple:
        raise ConfigError(f"pictures of {rows}×{columns} pixels; expected multiples of {about.multiple}")
    return given


def check_positive_integer(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
