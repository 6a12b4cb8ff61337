"""Similarity of layers: linear centred kernel alignment (CKA, Kornblith 2019) of all pairs.

S states (0 after the embedding, then after each block), B images, D width. Uses the unbiased estimate of HSIC (Song
2012, Nguyen 2021): with fewer images than dimensions, the biased estimate is always near 1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import FIGURE_WIDTH, GREY, SEQUENTIAL_MAP
from vitrail.inspection.representation.token_statistics import STATES_LABEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_CKA_IMAGES = 4  # the unbiased estimate divides by B − 3


def centred_kernel(features: NDArray[Any]) -> NDArray[Any]:
    """U-centred Gram matrix: zero diagonal, rows that sum to 0 (Székely 2014): (B, D) → (B, B).

    The inner product of two such matrices is B·(B − 3) times Song's unbiased estimate of HSIC.
    """
    features = features - features[0]  # exact: features equal for all images become 0
    features = features - features.mean(0)
    images = len(features)
    kernel = features @ features.T
    np.fill_diagonal(kernel, 0)
    sums = kernel.sum(0)
    kernel = kernel - (sums + sums[:, None]) / (images - 2) + sums.sum() / ((images - 1) * (images - 2))
    np.fill_diagonal(kernel, 0)
    return kernel


def linear_cka(features: Sequence[NDArray[Any]] | NDArray[Any]) -> NDArray[Any]:
    """Unbiased linear CKA between all states, each (B, D), where D may differ: → (S, S).

    1 if features differ by a rotation and a scale, about 0 (possibly negative) if they are independent, NaN if they are
    equal for all images, as for a class token after the embedding.
    """
    shapes = [each.shape for each in features]
    if not shapes or {len(shape) for shape in shapes} != {2} or min(shape[0] for shape in shapes) < MIN_CKA_IMAGES:
        given = (len(shapes), *shapes[0]) if shapes else ()
        raise ConfigError(
            f"features have shape {given}; expected (states, images, width) with {MIN_CKA_IMAGES} images or more"
        )
    kernels = np.stack([centred_kernel(each.astype(np.float64)).ravel() for each in features])  # (S, B·B)
    products = kernels @ kernels.T
    lengths = np.sqrt(products.diagonal())
    scale = np.where(lengths > 0, lengths, np.nan)
    return (products / scale / scale[:, None]).clip(-1, 1)


def plot_cka(matrix: NDArray[Any]) -> CaptionedFigure:
    """Heat map of the CKA between all states: (S, S)."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ConfigError(f"the CKA matrix has shape {matrix.shape}; expected (states, states), at least one")
    undefined = [str(state) for state in range(len(matrix)) if np.isnan(matrix[state, state])]

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, 4.6, "compressed")
        axes = figure.subplots()
        axes.set_facecolor(GREY)  # shows through NaN
        lowest = min(0.0, float(np.nanmin([*matrix.ravel(), 0.0])))
        image = axes.imshow(matrix, cmap=SEQUENTIAL_MAP, vmin=lowest, vmax=1, origin="lower", interpolation="nearest")
        style_axes(axes, "how similar the layers are")
        axes.set(xlabel=STATES_LABEL, ylabel=STATES_LABEL)
        axes.locator_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=axes, label="linear CKA", shrink=0.9)
        return figure

    caption = (
        f"Linear centred kernel alignment (unbiased) between the tokens {STATES_LABEL}."
        " A value of 1 means that two layers represent the images in the same way."
        f"{describe_least_similar_adjacent_states(matrix)}"
    )
    if undefined:
        caption += f" Grey: undefined, since state {', '.join(undefined)} is the same for all images."
    return CaptionedFigure(
        name="alignment", title="How similar the layers are", caption=caption, arrays={"alignment": matrix}, draw=draw
    )


def describe_least_similar_adjacent_states(matrix: NDArray[Any]) -> str:
    """Sentence on the two adjacent states that differ most."""
    steps = matrix.diagonal(1)
    if not len(steps) or np.isnan(steps).all():
        return ""
    step = int(np.nanargmin(steps))
    return f" The largest change is from state {step} to {step + 1} (CKA {steps[step]:.2f})."
