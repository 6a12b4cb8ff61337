"""From a picture to the likeliest classes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.checkpoint.reading import read, warn_of
from vitrail.data.images import open_image
from vitrail.data.preprocessing import Preprocessing, prepare
from vitrail.errors import ConfigError, VitrailError, one_line
from vitrail.tables import text_table


@dataclass(frozen=True)
class Answer:
    index: int
    label: str | None
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one picture, the likeliest first."""

    top: tuple[Answer, ...]

    def __str__(self) -> str:
        lines = [(str(each.index), each.label or "", f"{each.probability:.4f}") for each in self.top]
        return "\n".join(text_table(("class", "label", "probability"), lines, "rlr"))


class Predictor:
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
        if not config.classes:
            raise ConfigError("the model has no head, so no classes to answer with; expected one with classes")
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
        self.labels = None if labels is None else checked_labels(labels, config.classes)
        try:
            self.model = module.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
            raise ConfigError(
                f"device is {str(device)!r}; expected one that torch can use: {one_line(error)}"
            ) from None

    def predict(self, image: Any, top: int = 5) -> Prediction:
        """The likeliest classes of one picture, of any kind that `vitrail.data.images.open_image` takes."""
        check_count("top", top)
        return self.answer([image], top)[0]

    def predict_all(self, images: Iterable[Any], batch: int = 16, top: int = 5) -> Iterator[Prediction]:
        """One prediction a picture, in order; no more than a batch of them is taken ahead or held."""
        check_count("batch", batch)
        check_count("top", top)
        # the rows of one array would pass for grey pictures
        one = isinstance(images, str | bytes | Path) or getattr(images, "ndim", 4) < 4
        if one or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"images is one {type(images).__name__}; expected several: a list, or predict for one")
        return self.stream(iter(images), batch, top)

    def stream(self, images: Iterator[Any], batch: int, top: int) -> Iterator[Prediction]:
        while part := list(islice(images, batch)):
            yield from self.answer(part, top)

    @torch.inference_mode()
    def answer(self, images: Sequence[Any], top: int) -> list[Prediction]:
        pixels = torch.stack([torch.from_numpy(prepare(open_image(image), self.preprocessing)) for image in images])
        weight = next(self.model.parameters())
        logits: Tensor = self.model(pixels.to(weight.device, weight.dtype)).float()
        probabilities = logits.softmax(-1)
        if probabilities.isnan().any():
            raise VitrailError("the model answers NaN; expected finite weights: load them again, or in float32")
        order = logits.argsort(dim=-1, descending=True, stable=True)[:, :top]  # of equal classes the first
        rows = zip(order.tolist(), probabilities.gather(-1, order).tolist(), strict=True)
        return [self.named(indices, shares) for indices, shares in rows]

    def named(self, indices: Sequence[int], probabilities: Sequence[float]) -> Prediction:
        labels = [None if self.labels is None else self.labels[index] for index in indices]
        return Prediction(tuple(map(Answer, indices, labels, probabilities)))


def checked_labels(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    if isinstance(labels, str) or not all(isinstance(each, str) for each in labels):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"labels is {repr(labels)[:40]}; expected a list of texts")
    if len(labels) != classes:
        raise ConfigError(f"{len(labels)} labels for {classes} classes; expected one a class")
    return tuple(labels)


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
