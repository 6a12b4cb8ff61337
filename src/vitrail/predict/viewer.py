"""A model with all that it takes to show it pictures and to name what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.checkpoint.class_names import names_in
from vitrail.checkpoint.reading import read, warn_of
from vitrail.data.images import open_image
from vitrail.data.preprocessing import Preprocessing, prepare
from vitrail.errors import ConfigError, DataError, VitrailError, one_line
from vitrail.tables import text_table

NOT_FINITE = "the model answers NaN; expected finite weights: load them again, or in float32"


@dataclass(frozen=True)
class Answer:
    index: int
    label: str | None
    probability: float

    @property
    def name(self) -> str:
        """For people: the first of the names that a label lists, without WordNet's number; else the class's."""
        return next(iter(names_in(self.label or "")), f"class {self.index}")


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one picture, the likeliest first."""

    top: tuple[Answer, ...]

    def __str__(self) -> str:
        lines = [(str(each.index), each.label or "", f"{each.probability:.4f}") for each in self.top]
        return "\n".join(text_table(("class", "label", "probability"), lines, "rlr"))


class Viewer:
    """A model, its preprocessing and its class names in one; the model is put into eval mode."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if not isinstance(model, nn.Module):
            with torch.inference_mode(False):  # whose weights would have no gradients ever after
                found = read(model)
            warn_of(found, model)
            preprocessing = preprocessing or found.description.preprocessing
            labels = found.description.labels if labels is None else labels
            module: nn.Module = found.model
        else:
            module = model
        config: Any = getattr(module, "config", None)
        if not all(hasattr(config, name) for name in ("image_size", "channels", "classes")):
            kind = type(module).__name__
            raise ConfigError(f"{kind} has no config; expected a model with its image_size, channels and classes in it")
        if not isinstance(preprocessing, Preprocessing):
            raise ConfigError(
                f"preprocessing is {preprocessing!r}; expected how the model was trained to see, for instance "
                "vitrail.Preprocessing(crop=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))"
            )
        if len(preprocessing.mean) != config.channels:
            raise ConfigError(f"preprocessing of {len(preprocessing.mean)} channels; expected {config.channels}")
        if not getattr(config, "dynamic", False):
            preprocessing = replace(preprocessing, image_size=config.image_size)
        self.preprocessing = preprocessing
        self.classes: int = config.classes
        self.labels = None if labels is None or not self.classes else checked_labels(labels, self.classes)
        try:
            self.model: Any = module.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
            raise ConfigError(
                f"device is {str(device)!r}; expected one that torch can use: {one_line(error)}"
            ) from None

    def see(self, images: Sequence[Any]) -> Tensor:
        """The model's input, of pictures of any kind that `vitrail.data.images.open_image` takes: (B, C, H, W)."""
        pixels = torch.stack([torch.from_numpy(self.prepared(image)) for image in images])
        weight = next(self.model.parameters())
        return pixels.to(weight.device, weight.dtype)

    def prepared(self, image: Any) -> NDArray[np.float32]:
        picture = open_image(image)
        try:
            return prepare(picture, self.preprocessing)
        except DataError as error:  # which knows the picture, but not its name
            raise DataError(f"{str(image)!r}: {error}") if isinstance(image, str | Path) else error from None

    def likeliest(self, logits: Tensor, top: int) -> list[Prediction]:
        """The `top` classes of each picture: (B, classes)."""
        logits = logits.float()
        probabilities = logits.softmax(-1)
        if probabilities.isnan().any():
            raise VitrailError(NOT_FINITE)
        order = logits.argsort(dim=-1, descending=True, stable=True)[:, :top]  # of equal classes the first
        rows = zip(order.tolist(), probabilities.gather(-1, order).tolist(), strict=True)
        return [Prediction(tuple(map(self.answer, indices, shares))) for indices, shares in rows]

    def answer(self, index: int, probability: float) -> Answer:
        return Answer(index, None if self.labels is None else self.labels[index], probability)


def checked_labels(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    if isinstance(labels, str) or not all(isinstance(each, str) for each in labels):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"labels is {repr(labels)[:40]}; expected a list of texts")
    if len(labels) != classes:
        raise ConfigError(f"{len(labels)} labels for {classes} classes; expected one a class")
    return tuple(labels)
