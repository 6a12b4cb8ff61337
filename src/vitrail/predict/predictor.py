"""From pictures to the likeliest classes, or to features, by whichever engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.data.framed import framed
from vitrail.data.image_formats import DEFAULT, Limits
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.shown import Shown
from vitrail.errors import CheckpointError, ConfigError
from vitrail.export.exported import Exported, Output, is_exported
from vitrail.machine import cores
from vitrail.models.checks import pair
from vitrail.predict.answers import Prediction, checked_labels, likeliest
from vitrail.predict.stream import Engine, Row, rows

if TYPE_CHECKING:
    import torch
    from torch import nn

BATCH = 8  # pictures at once, unless said
PRECISIONS: dict[str, Literal["fp32", "int8"]] = {"onnx": "fp32", "int8": "int8"}  # of the engines that are exports


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
        output: Output = "logits",
        merge: int = 0,
        limits: Limits = DEFAULT,
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
            from vitrail.predict.kept import kept_export

            keep = partial(kept_export, viewer, output, merge=merge, precision=PRECISIONS[engine])
            settled = (preprocessing, self.labels, engine, streams, threads, merge)
            try:
                self.open_exported(keep(), *settled)
            except CheckpointError:  # damaged since it was written
                self.open_exported(keep(rebuild=True), *settled)
            return
        from vitrail.models.merging import merged
        from vitrail.predict.torch_engine import TorchEngine

        self.model = merged(viewer.model, merge)
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

        found = OnnxEngine(place, streams=streams, threads=threads or cores())
        about = found.about
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
        self.engine, self.preprocessing, self.classes = found, fitting(preprocessing, about), about.classes
        self.labels = about.labels if labels is None else checked_labels(labels, self.classes)

    def predict(self, image: Any, top: int = 5) -> Prediction:
        """The likeliest classes of one picture, of any kind that `vitrail.data.images.open_image` takes."""
        check_count("top", top)
        self.check_classes()
        return self.likeliest(self.engine.run(np.stack([self.prepared(image)]))[0], top)

    def predict_all(self, images: Iterable[Any], batch: int = BATCH, top: int = 5) -> Iterator[Prediction]:
        """One prediction a picture, in order, a few batches ahead; a picture that cannot be read is a DataError."""
        check_count("batch", batch)
        check_count("top", top)
        self.check_classes()
        # the rows of one array would pass for grey pictures
        one = isinstance(images, str | bytes | Path) or getattr(images, "ndim", 4) < 4
        if one or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"images is one {type(images).__name__}; expected several: a list, or predict for one")
        shown = (Shown(each, str(each) if isinstance(each, str | Path) else "") for each in images)
        return self.answers(self.rows(shown, batch), top)

    def answers(self, found: Iterable[Row], top: int) -> Iterator[Prediction]:
        for row in found:
            if row.values is None:
                raise row.error or ConfigError("a picture without an answer")
            yield self.likeliest(row.values, top)

    def rows(self, pictures: Iterable[Shown], batch: int = BATCH) -> Iterator[Row]:
        """The engine's numbers for each picture, in order; for one that cannot be read why, and the others go on."""
        return rows(self.engine, pictures, self.prepared, batch)

    def prepared(self, image: Any) -> NDArray[np.uint8]:
        """What the engine sees of a picture: (rows, columns, C)."""
        return framed(image, self.preprocessing, self.limits, scaled=self.scaled)

    def likeliest(self, values: NDArray[np.float32], top: int) -> Prediction:
        return likeliest(values[None], self.labels, top)[0]

    def check_classes(self) -> None:
        if self.output != "logits":
            raise ConfigError(f"the predictor gives features, {self.output}; expected output='logits' for classes")


def fitting(given: Preprocessing | None, about: Exported) -> Preprocessing:
    """What is asked for, at a size that the file takes."""
    if given is None:
        return about.preprocessing
    if about.multiple == 0:
        return replace(given, image_size=about.preprocessing.image_size)
    rows, columns = pair(given.image_size)
    if rows % about.multiple or columns % about.multiple:
        raise ConfigError(f"pictures of {rows}×{columns} pixels; expected multiples of {about.multiple}")
    return given


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
