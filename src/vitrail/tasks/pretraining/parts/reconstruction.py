"""Reconstructions of masked images, and their figure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.figures import CaptionedFigure
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.tasks.pretraining.parts.image_rows import plot_image_rows, to_pixels

MASK_GREY = 0.5  # colour of hidden pixels


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Images, which of their pixels were hidden, and what was predicted; visible pixels are those of the image.

    Pixels are from 0 to 1, in float32 (B, H, W, C).
    """

    images: NDArray[np.float32]
    hidden: NDArray[np.bool_]  # (B, H, W)
    predicted: NDArray[np.float32]

    @property
    def masked(self) -> NDArray[np.float32]:
        return np.where(self.hidden[..., None], np.float32(MASK_GREY), self.images)

    @property
    def errors(self) -> NDArray[np.float32]:
        """The absolute error, mean of the channels: (B, H, W)."""
        return np.abs(self.predicted - self.images).mean(-1)

    def as_arrays(self) -> dict[str, NDArray[np.float32]]:
        return {"images": self.images, "masked": self.masked, "predicted": self.predicted, "errors": self.errors}


def make_reconstruction(
    images: Tensor, predicted: Tensor, hidden: Tensor, preprocessing: Preprocessing
) -> Reconstruction:
    """From model input (B, C, H, W), the predicted one, and the hidden pixels, bool (B, H, W)."""
    originals, places = to_pixels(images, preprocessing), hidden.cpu().numpy()
    shown = np.where(places[..., None], to_pixels(predicted, preprocessing), originals)
    return Reconstruction(images=originals, hidden=places, predicted=shown)


def make_reconstruction_figure(found: Reconstruction, caption: str) -> CaptionedFigure:
    """The images, what the model received, the predictions, and the errors."""
    arrays = found.as_arrays()
    return plot_image_rows(
        name="reconstructions",
        title="Reconstructions of masked images",
        caption=caption,
        rows=dict(zip(("image", "visible", "prediction", "error"), arrays.values(), strict=True)),
        arrays=arrays,
    )
