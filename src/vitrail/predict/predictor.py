"""From a picture to the likeliest classes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.predict.viewer import Prediction, Viewer


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
        self.viewer = Viewer(model, preprocessing=preprocessing, labels=labels, device=device)
        self.model, self.preprocessing, self.labels = self.viewer.model, self.viewer.preprocessing, self.viewer.labels
        if not self.viewer.classes:
            raise ConfigError("the model has no head, so no classes to answer with; expected one with classes")

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
        return self.viewer.likeliest(self.model(self.viewer.see(images)), top)


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
