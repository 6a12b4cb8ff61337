"""Principal components of the first layer's filters (Dosovitskiy 2020, figure 7).

D filters, C channels, P×Q pixels, k components.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import FIGURE_WIDTH, GREY, LABEL_POINTS, NOTE_POINTS, TITLE_POINTS
from vitrail.models.base.contract import ImageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILTERS_PER_ROW = 7  # as in the paper


def find_first_filters(model: ImageModel) -> NDArray[Any] | None:
    """Weight (D, C, P, Q) of the first convolution over the image's channels; None if there is none."""
    if not model.first_filters:
        return None
    return model.get_parameter(model.first_filters).detach().cpu().float().numpy()


def principal_filters(weight: NDArray[Any], count: int = 28) -> tuple[NDArray[Any], NDArray[Any]]:
    """Principal components and their shares of variance: (D, C, P, Q) → (k, C, P, Q), (k,).

    Components have norm 1; their sign, which is arbitrary, makes the largest entry positive. k is `count` at most.
    """
    if weight.ndim != 4 or not weight.size or count < 1:
        raise ConfigError(
            f"cannot compute {count} components of filters of shape {weight.shape}; expected 1 or more,"
            " of filters (width, channels, rows, columns)"
        )
    flat = weight.reshape(len(weight), -1).astype(np.float64)
    _, scales, directions = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    largest = np.take_along_axis(directions, np.abs(directions).argmax(1)[:, None], 1)
    components = directions * np.where(largest < 0, -1, 1)
    variances = scales**2
    shares = variances / (variances.sum() or 1)
    count = min(count, max(1, len(weight) - 1))  # rank of D centred filters
    return components[:count].reshape(-1, *weight.shape[1:]), shares[:count]


def filter_to_image(component: NDArray[Any]) -> NDArray[Any]:
    """Scale to 0 to 1, with 0 at 0.5, as an image of 1 or 3 channels: (C, P, Q) → (P, Q, 1 or 3)."""
    image = component if len(component) in (1, 3) else component.mean(0, keepdims=True)
    return (0.5 + image / (2 * np.abs(image).max() or 1)).transpose(1, 2, 0)


def plot_filters(components: NDArray[Any], shares: NDArray[Any]) -> CaptionedFigure:
    """Plot the components as images, each scaled separately, with their shares of variance: (k, C, P, Q), (k,)."""
    if components.ndim != 4 or not len(components) or shares.shape != components.shape[:1]:
        raise ConfigError(
            f"components have shape {components.shape} and shares {shares.shape};"
            " expected (k, channels, rows, columns) and (k,), as from principal_filters"
        )
    count, channels, p, q = components.shape
    columns = min(count, FILTERS_PER_ROW)
    rows = -(-count // columns)

    def draw() -> "Figure":
        width = 1.1 * min(1.0, q / p)  # of a component, in inches
        figure = new_figure(FIGURE_WIDTH, rows * (width * p / q + 0.28) + 0.7)
        figure.suptitle(f"patterns in the first filters, {p}×{q} pixels", fontsize=TITLE_POINTS, x=0.02, ha="left")
        for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=number < count, color=GREY, linewidth=0.5)
            if number < count:
                axes.imshow(filter_to_image(components[number]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_xlabel(f"{number}: {shares[number]:.1%}", fontsize=NOTE_POINTS, labelpad=2)
        figure.supxlabel("principal component: share of the filters' variance", fontsize=LABEL_POINTS)
        return figure

    colours = {1: "in greyscale", 3: "in RGB"}.get(channels, f"as the mean of {channels} channels")
    caption = (
        f"The first {count} principal components of the filters of the first layer ({p}×{q} pixels), {colours}. They"
        f" explain {shares.sum():.1%} of the filters' variance, the first alone {shares[0]:.1%}. Each component is"
        " scaled separately, with 0 at mid-grey; the sign is arbitrary."
    )
    return CaptionedFigure(
        name="filters",
        title="Patterns in the filters of the first layer",
        caption=caption,
        arrays={"components": components, "shares": shares},
        draw=draw,
    )
