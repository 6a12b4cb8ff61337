"""Figures of several versions of the same images, one row per version: input, masked, prediction."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import FIGURE_WIDTH, LABEL_POINTS, TITLE_POINTS
from vitrail.data.images.preprocessing import Preprocessing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_SIDE = 1.0  # inches, for 8 images or fewer


def plot_image_rows(
    *,
    name: str,
    title: str,
    caption: str,
    rows: Mapping[str, NDArray[Any]],
    arrays: Mapping[str, NDArray[Any]],
) -> CaptionedFigure:
    """A figure with a row of N images for each label.

    Images are (N, H, W, C) with pixels from 0 to 1, or (N, H, W) for values that are shown as colours from black, 0, to
    the largest. `arrays` are saved with the figure.
    """
    return CaptionedFigure(
        name=name, title=title, caption=caption, arrays=dict(arrays), draw=lambda: draw_image_rows(title, rows)
    )


def draw_image_rows(title: str, rows: Mapping[str, NDArray[Any]]) -> "Figure":
    count = len(next(iter(rows.values())))
    figure = new_figure(FIGURE_WIDTH, len(rows) * PANEL_SIDE * min(1.0, 8 / count) * 1.15 + 0.3)
    for (label, images), axes_row in zip(rows.items(), figure.subplots(len(rows), count, squeeze=False), strict=True):
        largest = max(float(images.max()), 1e-6)  # ignored for RGB
        for image, axes in zip(to_rgb(images) if images.ndim == 4 else images, axes_row, strict=True):
            axes.imshow(image, cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        axes_row[0].set_ylabel(label, fontsize=LABEL_POINTS)
    figure.suptitle(title, fontsize=TITLE_POINTS, x=0.02, ha="left")
    return figure


def to_rgb(images: NDArray[Any]) -> NDArray[Any]:
    """Greyscale, the mean of the channels, for other numbers of channels than 3: (N, H, W, C) → (N, H, W, 3)."""
    shown = images if images.shape[-1] == 3 else images.mean(-1, keepdims=True)
    return np.broadcast_to(shown.clip(0, 1), (*images.shape[:3], 3))


def to_pixels(inputs: Tensor, preprocessing: Preprocessing) -> NDArray[np.float32]:
    """Model input as pixels from 0 to 1: (N, C, H, W) → (N, H, W, C)."""
    mean, std = (np.array(each, np.float32) for each in (preprocessing.mean, preprocessing.std))
    return (inputs.detach().float().cpu().permute(0, 2, 3, 1).numpy() * std + mean).clip(0, 1)
