"""A model that reads images, as `vitrail serve` runs it: one photo per call, on one thread by default.

torch is imported only for models that run on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.kinds import ServedTensor
from vitrail.base.machine import count_cores
from vitrail.data.images.decoding.image_formats import ImageLimits
from vitrail.data.photos import EXAMPLE_PREFIX, locate_example_photo
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import Size, pair
from vitrail.opening import GivenPreprocessing, Opened
from vitrail.predict.model_checksums import compute_model_key
from vitrail.predict.predictions import softmax
from vitrail.predict.predictor import EngineName, Predictor, choose_features, get_output_engine

SERVED_LIMITS = ImageLimits(  # smaller than on a command line: several strangers send at the same time
    pixels=25_000_000,
    bytes=2**28,  # the body has a smaller limit
    reduced_pixels=100_000_000,
    formats=("JPEG", "PNG", "WebP", "GIF", "BMP"),
)
BYTES_PER_PIXEL = 14  # while a transparent PNG is decoded and converted, at most
DEFAULT_TOP = 5
Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The parameters of a request, by the names that clients of Hugging Face send."""

    top: int = DEFAULT_TOP
    activation: Activation = "softmax"


class ServedImages:
    """Predictions and features of photos. A request has the bytes of a file, or pixels of the right size."""

    def __init__(
        self,
        model: str,
        *,
        engine: EngineName = "auto",
        streams: int | None = None,
        latency: bool = False,
        labels: Sequence[str] | None = None,
        image_size: Size | None = None,
        fields: Mapping[str, Any] | None = None,
        preprocessing: GivenPreprocessing = None,
        device: str | None = None,
    ) -> None:
        self.streams, threads = choose_streams(streams, latency=latency)
        self.predictor = Predictor(
            model,
            engine=engine,
            streams=self.streams,
            threads=threads,
            labels=labels,
            image_size=image_size,
            fields=fields,
            preprocessing=preprocessing,
            device=device,
            limits=SERVED_LIMITS,
            scaled=True,
        )
        self.features: str | None = self.predictor.output if self.predictor.output != "logits" else None
        if self.features is None and not isinstance(self.opened.model, ExportedModel):
            self.features = choose_features(self.opened)
        how = self.opened.preprocessing
        self.pixels_shape = (*pair(how.image_size), len(how.mean))
        self.inputs = (
            ServedTensor(name="image", datatype="BYTES"),
            ServedTensor(name="pixels", datatype="UINT8", shape=self.pixels_shape),
        )
        self.example = read_example_photo()
        self.outputs = self.describe_outputs()
        self.facts = self.describe(compute_model_key(model))

    @property
    def opened(self) -> Opened:
        return self.predictor.loaded

    @property
    def item_bytes(self) -> int:
        return BYTES_PER_PIXEL * (SERVED_LIMITS.pixels or 0)

    def describe_outputs(self) -> tuple[ServedTensor, ...]:
        """Each output, with the shape that the model computes."""
        blank = np.zeros(self.pixels_shape, np.uint8)
        names = dict.fromkeys(each for each in (self.predictor.output, self.features) if each is not None)
        return tuple(
            ServedTensor(
                name=name,
                datatype="FP32",
                shape=self.compute(blank, name).shape,
                labels=self.predictor.labels if name == "logits" else None,
            )
            for name in names
        )

    def describe(self, digest: str) -> dict[str, Any]:
        predictor, opened = self.predictor, self.opened
        exported = isinstance(opened.model, ExportedModel)
        return {
            "kind": opened.kind,
            "classes": predictor.classes,
            "labels": None if predictor.labels is None else list(predictor.labels),
            "image_size": list(self.pixels_shape[:2]),
            "precision": predictor.engine.name if predictor.engine.name in ("int8", "bfloat16") else "fp32",
            "engine": "onnx" if exported else predictor.engine.name,
            "threads": predictor.engine.threads,
            "digest": digest,
        }

    def parse_settings(self, given: Mapping[str, Any]) -> ImageSettings:
        known: Mapping[str, Any] = {"top_k": DEFAULT_TOP, "function_to_apply": "softmax"}
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"unknown parameter {unknown[0][:40]!r}; expected {' or '.join(known)}")
        settings = {name: default if given.get(name) is None else given[name] for name, default in known.items()}
        top, activation = str(settings["top_k"]), settings["function_to_apply"]
        if not top.isascii() or not top.isdecimal() or not int(top[:9]) > 0:
            raise ConfigError(f"top_k is {top[:20]}; expected a number of classes, 1 or more")
        if activation not in get_args(Activation):
            raise ConfigError(
                f"function_to_apply is {str(activation)[:20]!r}; expected {', '.join(get_args(Activation))}"
            )
        return ImageSettings(top=int(top[:9]), activation=activation)

    def prepare(self, name: str, value: Any, settings: ImageSettings) -> NDArray[np.uint8]:
        del settings
        return value if name == "pixels" else self.predictor.prepare_image(value)

    def run(self, item: NDArray[np.uint8], outputs: Sequence[str]) -> Mapping[str, NDArray[np.float32]]:
        """Alone, never in a batch: an int8 model quantizes over the whole batch."""
        found = {name: self.compute(item, name) for name in outputs}
        for values in found.values():
            if not ((values < np.inf).all() and np.isfinite(values).any()):
                raise DataError(NOT_FINITE_MESSAGE)
        return found

    def compute(self, pixels: NDArray[np.uint8], output: Any) -> NDArray[np.float32]:
        return get_output_engine(self.predictor, output).run(np.stack([pixels]))[0]  # a copy, which may be written to

    def to_json(self, found: Mapping[str, NDArray[np.float32]], settings: ImageSettings) -> list[dict[str, Any]]:
        """The most probable classes, as `{label, score}`."""
        if "logits" not in found:
            raise ConfigError(f"{self.opened.source} has no classes; ask for its features with /embed")
        logits, labels = found["logits"], self.predictor.labels
        scores = apply_activation(logits, settings.activation)
        order = np.argsort(-logits, kind="stable")[: settings.top].tolist()
        return [
            {"label": str(index) if labels is None else labels[index], "score": float(scores[index])} for index in order
        ]


def choose_streams(streams: int | None, *, latency: bool) -> tuple[int, int]:
    """Streams, and threads of each: one per core by default, since threads that wait for each other spin."""
    if latency and streams not in (None, 1):
        raise ConfigError(f"`latency` with `streams` {streams}; expected one of them", ("latency", "streams"))
    if streams is not None and streams < 1:
        raise ConfigError(f"`streams` {streams}; expected 1 or more", ("streams",))
    return (1, count_cores()) if latency else (streams or count_cores(), 1)


def apply_activation(logits: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    if activation == "softmax":
        return softmax(logits)
    if activation == "none":
        return logits
    with np.errstate(over="ignore"):
        return np.reciprocal(1 + np.exp(-logits), dtype=np.float32)


def read_example_photo() -> bytes:
    with open(locate_example_photo(f"{EXAMPLE_PREFIX}cat"), "rb") as file:  # noqa: PTH123
        return file.read()
