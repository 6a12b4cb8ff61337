"""A model with all that it takes to show it pictures and to name what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.checkpoint.reading import read, warn_about_report
from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.preprocessing import Preprocessing, preprocess_image
from vitrail.errors import ConfigError, DataError, describe_error
from vitrail.predict.predictions import ClassProbability, Prediction, check_class_labels, predictions_from_logits


class Viewer:
    """A model, its preprocessing and its class names in one; the model is put into eval mode."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            with torch.inference_mode(False):  # whose weights would have no gradients ever after
                found = read(model, **(fields or {}))
            warn_about_report(found, model, () if preprocessing is None else ("preprocessing",))
            preprocessing = preprocessing or found.description.preprocessing
            labels = found.description.labels if labels is None else labels
            module: nn.Module = found.model
        elif fields:
            raise ConfigError(
                f"{min(fields)} was given for a model that is already loaded; expected a path, or no fields"
            )
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
        self.labels = None if labels is None or not self.classes else check_class_labels(labels, self.classes)
        try:
            self.model: Any = module.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
            raise ConfigError(
                f"device is {str(device)!r}; expected one that torch can use: {describe_error(error)}"
            ) from None

    def see(self, images: Sequence[Any]) -> Tensor:
        """The model's input for images of any kind that `open_image` takes: (B, C, H, W)."""
        pixels = torch.stack([torch.from_numpy(self.prepared(image)) for image in images])
        weight = next(self.model.parameters())
        return pixels.to(weight.device, weight.dtype)

    def prepared(self, image: Any) -> NDArray[np.float32]:
        picture = open_image(image)
        try:
            return preprocess_image(picture, self.preprocessing)
        except DataError as error:  # which knows the picture, but not its name
            raise DataError(f"{str(image)!r}: {error}") if isinstance(image, str | Path) else error from None

    def likeliest(self, logits: Tensor, top: int) -> list[Prediction]:
        """The `top` classes of each picture: (B, classes)."""
        return predictions_from_logits(logits.float().cpu().numpy(), self.labels, top)

    def answer(self, index: int, probability: float) -> ClassProbability:
        return ClassProbability(index, None if self.labels is None else self.labels[index], probability)
