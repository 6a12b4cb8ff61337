"""A model with all that it takes to run it on photos. An exported model runs without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.text import abbreviate_list
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.images.decoding.model_input import ImageTransform
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import pair

if TYPE_CHECKING:
    from torch import nn

    from vitrail.checkpoint.reading import Checkpoint


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in eval mode with its preprocessing and class names, from `vitrail.open_model`.

    `model(batch)` returns logits.

    >>> loaded = vitrail.open_model("vit_fashion")
    >>> loaded.model(loaded.make_batch(["example:cat", "example:rocket"])).shape
    torch.Size([2, 10])
    """

    source: str  # the name that it was opened by
    model: "nn.Module | ExportedModel"
    preprocessing: Preprocessing
    classes: int  # 0 without a head
    labels: tuple[str, ...] | None = None
    run: FinishedRun | None = None
    checkpoint: "Checkpoint | None" = None  # its layout, description and load report

    def __repr__(self) -> str:
        kind, size = type(self.model).__name__, "×".join(map(str, pair(self.preprocessing.image_size)))
        if isinstance(self.model, ExportedModel):
            kind, weights = "exported", self.model.description.precision
        else:
            weights = f"{sum(each.numel() for each in self.model.parameters()):,} parameters"
        labels = f": {abbreviate_list(self.labels, 3)}" if self.labels else ""
        classes = f"{self.classes:,} classes{labels}" if self.classes else "no head"
        return f"LoadedModel({self.source!r}, {kind}, {weights}, {size} pixels, {classes})"

    @property
    def transform(self) -> ImageTransform:
        """A transform as torchvision's, which data loaders can use: `transform(photo)` is the model's input.

        The result is a tensor (C, rows, columns) on the CPU; for an exported model an array of uint8 (rows, columns,
        C). A photo is a path, bytes, a Pillow image, an array or a tensor. Only the settings are pickled for the
        workers of a data loader, not the model.

        >>> loaded = vitrail.open_model("vit_fashion")
        >>> loaded.transform("example:cat").shape
        torch.Size([1, 28, 28])
        """
        if isinstance(self.model, ExportedModel):
            return ImageTransform(self.preprocessing)
        return ImageTransform(self.preprocessing, next(self.model.parameters()).dtype)

    def make_batch(self, photos: Sequence[Any]) -> Any:
        """The model's input for several photos, with the batch as the first dimension, on the model's device."""
        inputs = [*map(self.transform, photos)]
        if isinstance(self.model, ExportedModel):
            return np.stack(inputs)
        import torch

        return torch.stack(inputs).to(next(self.model.parameters()).device)

    @property
    def module(self) -> "nn.Module":
        """The model as a torch module; an exported one is wrapped in one, run by ONNX Runtime."""
        if not isinstance(self.model, ExportedModel):
            return self.model
        from vitrail.export.torch_modules import ExportedModule

        return ExportedModule(self.model)
