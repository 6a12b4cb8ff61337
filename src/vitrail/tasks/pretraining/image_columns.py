"""A figure of several versions of the same images next to each other: input, masked, prediction."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.figures import FIGURE_WIDTH, CaptionedFigure, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_SIDE = 0.95  # inches


def plot_image_columns(
    *,
    name: str,
    title: str,
    caption: str,
    columns: Mapping[str, Tensor],
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> CaptionedFigure:
    """Plot each version of N images, with pixels from 0 to 1, as a row of a figure: {label: (N, C, H, W)}.

    The arrays of the figure are these versions, uint8 (N, H, W, C), and `arrays`.
    """
    images = {label: to_displayed_pixels(version) for label, version in columns.items()}
    count = len(next(iter(images.values())))

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, len(images) * PANEL_SIDE * min(1.0, 8 / count) * 1.15 + 0.3)
        grid = figure.subplots(len(images), count, squeeze=False)
        for (label, version), row in zip(images.items(), grid, strict=True):
            for image, axes in zip(version, row, strict=True):
                axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            row[0].set_ylabel(label, fontsize=9)
        figure.suptitle(title, fontsize=11, x=0.02, ha="left")
        return figure

    saved = {label.replace(" ", "_"): version for label, version in images.items()}
    return CaptionedFigure(name=name, title=title, caption=caption, arrays={**saved, **(arrays or {})}, draw=draw)


def to_displayed_pixels(images: Tensor) -> NDArray[np.uint8]:
    """Pixels from 0 to 1 as RGB, or as greyscale, for other numbers of channels: (N, C, H, W) → (N, H, W, 1 or 3)."""
    shown = images if images.shape[1] in (1, 3) else images.mean(1, keepdim=True)
    return (shown.float().clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()
