"""Reconstructions of masked images, and their figure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.figures import CaptionedFigure, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASK_GREY = 0.5  # colour of hidden pixels


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Images, what the model saw, and what it predicted; visible pixels are those of the image.

    Pixels are from 0 to 1, in float32 (B, H, W, C).
    """

    images: NDArray[np.float32]
    hidden: NDArray[np.bool_]  # (B, H, W): which pixels were hidden
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
    mean, std = (np.array(each, np.float32) for each in (preprocessing.mean, preprocessing.std))

    def to_pixels(each: Tensor) -> NDArray[np.float32]:
        return (each.detach().float().cpu().permute(0, 2, 3, 1).numpy() * std + mean).clip(0, 1)

    originals, places = to_pixels(images), hidden.cpu().numpy()
    return Reconstruction(
        images=originals, hidden=places, predicted=np.where(places[..., None], to_pixels(predicted), originals)
    )


def make_reconstruction_figure(found: Reconstruction, caption: str) -> CaptionedFigure:
    """A row per image: the image, what the model saw, the prediction, and the error."""
    return CaptionedFigure(
        name="reconstructions",
        title="Reconstructions of masked images",
        caption=caption,
        arrays=found.as_arrays(),
        draw=lambda: draw_reconstructions(found),
    )


def draw_reconstructions(found: Reconstruction) -> "Figure":
    arrays = found.as_arrays()
    columns, largest = len(found.images), max(float(arrays["errors"].max()), 1e-6)
    figure = new_figure(max(1.3 * columns, 4), 5.6)
    every = figure.subplots(4, columns, squeeze=False)
    titles = ("image", "visible", "prediction", "error")
    for axes_row, title, values in zip(every, titles, arrays.values(), strict=True):
        for axes, value in zip(axes_row, values, strict=True):
            shown = np.broadcast_to(value, (*value.shape[:2], 3)) if value.ndim == 3 else value
            axes.imshow(shown, vmin=0, vmax=largest, cmap="magma")
            axes.set_xticks([])
            axes.set_yticks([])
        axes_row[0].set_ylabel(title, fontsize=11)
    return figure
