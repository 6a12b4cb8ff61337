"""Patterns in the weights (Dosovitskiy 2020, figure 7): filters of the first layer, similarity of position embeddings.

D filters or width, C channels, P×Q pixels, k components, E prefix tokens, n = h·w patches.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import (
    DIVERGING_MAP,
    FIGURE_WIDTH,
    GRAY,
    LABEL_POINTS,
    NOTE_POINTS,
    SEQUENTIAL_MAP,
    TITLE_POINTS,
)
from vitrail.data.images.image_items import evenly_spaced_indices
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
    count = min(count, max(1, len(weight) - 1))  # rank of D centered filters
    return components[:count].reshape(-1, *weight.shape[1:]), shares[:count]


def filter_to_image(component: NDArray[Any]) -> NDArray[Any]:
    """Scale to 0 to 1, with 0 at 0.5, as an image of 1 or 3 channels: (C, P, Q) → (P, Q, 1 or 3)."""
    image = component if len(component) in (1, 3) else component.mean(0, keepdims=True)
    return (0.5 + image / (2 * np.abs(image).max() or 1)).transpose(1, 2, 0)


def draw_filters(components: NDArray[Any], shares: NDArray[Any]) -> CaptionedFigure:
    """Plot the components as images, each scaled separately, with their shares of variance: (k, C, P, Q), (k,)."""
    count, channels, p, q = components.shape
    columns = min(count, FILTERS_PER_ROW)
    rows = -(-count // columns)

    def draw() -> "Figure":
        width = 1.1 * min(1.0, q / p)  # of a component, in inches
        figure = new_figure(FIGURE_WIDTH, rows * (width * p / q + 0.28) + 0.7)
        figure.suptitle(f"patterns in the first filters, {p}×{q} pixels", fontsize=TITLE_POINTS, x=0.02, ha="left")
        for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=number < count, color=GRAY, linewidth=0.5)
            if number < count:
                axes.imshow(filter_to_image(components[number]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_xlabel(f"{number}: {shares[number]:.1%}", fontsize=NOTE_POINTS, labelpad=2)
        figure.supxlabel("principal component: share of the filters' variance", fontsize=LABEL_POINTS)
        return figure

    colors = {1: "in grayscale", 3: "in RGB"}.get(channels, f"as the mean of {channels} channels")
    caption = (
        f"The first {count} principal components of the filters of the first layer ({p}×{q} pixels), {colors}. They"
        f" explain {shares.sum():.1%} of the filters' variance, the first alone {shares[0]:.1%}. Each component is"
        " scaled separately, with 0 at mid-gray; the sign is arbitrary."
    )
    return CaptionedFigure(
        name="filters",
        title="Patterns in the filters of the first layer",
        caption=caption,
        arrays={"components": components, "shares": shares},
        draw=draw,
    )


MAX_TILES = 16  # along an axis
MIN_ASPECT_OF_BAR = 0.3  # height to width, from which there is room for the scale on the right
MIN_GRID = 6  # patches along an axis from which the maps show structure


def find_position_table(model: ImageModel) -> NDArray[Any] | None:
    """The position embeddings added to the patches before the first layer, (n, D); None if there are none."""
    grid = model.levels[0].grid
    table = model.tables(grid)
    return None if table is None else table[0, -grid[0] * grid[1] :].detach().cpu().float().numpy()


def position_similarity(table: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any]:
    """Cosine similarity of all pairs of rows, 0 for a row of zeros: (n, D) → (h, w, h, w)."""
    if table.ndim != 2 or len(table) != grid[0] * grid[1]:
        raise ConfigError(
            f"the position table has shape {table.shape}; expected one row for each of the"
            f" {grid[0]}·{grid[1]} = {grid[0] * grid[1]} patches, without prefix tokens"
        )
    norms = np.linalg.norm(table, axis=-1, keepdims=True)
    unit = table / np.where(norms > 0, norms, 1)
    return (unit @ unit.T).clip(-1, 1).reshape(*grid, *grid)


def compare_near_and_far(similarity: NDArray[Any]) -> tuple[float, float]:
    """The mean similarity of patches that share an edge, and of those further apart: (h, w, h, w)."""
    h, w = similarity.shape[:2]
    rows, columns = np.divmod(np.arange(h * w), w)
    steps = abs(rows - rows[:, None]) + abs(columns - columns[:, None])
    values = similarity.reshape(h * w, h * w)
    near, far = (float(values[chosen].mean()) if chosen.any() else np.nan for chosen in (steps == 1, steps > 1))
    return near, far


def choose_cosine_scale(cosines: NDArray[Any]) -> dict[str, Any]:
    """Colors from 0 to 1 if no cosine is negative, else from -1 to 1 with 0 in the neutral middle."""
    signed = bool(cosines.min() < 0)
    return {"cmap": DIVERGING_MAP if signed else SEQUENTIAL_MAP, "vmin": -1 if signed else 0, "vmax": 1}


def tile_maps(tiles: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Join tiles (r, c, h, w) into one map with gaps of NaN; also the centers of the rows and columns of tiles."""
    r, c, h, w = tiles.shape
    scale = max(1, 48 // max(h, w))  # so that a gap can be narrower than a cell
    tiles = tiles.repeat(scale, axis=2).repeat(scale, axis=3)
    h, w = h * scale, w * scale
    gap = max(1, max(h, w) // 10)
    padded = np.pad(tiles.astype(np.float64), ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    joined = padded.transpose(0, 2, 1, 3).reshape(r * (h + gap), c * (w + gap))[:-gap, :-gap]
    return joined, (h - 1) / 2 + np.arange(r) * (h + gap), (w - 1) / 2 + np.arange(c) * (w + gap)


def draw_position_similarity(similarity: NDArray[Any]) -> CaptionedFigure:
    """Plot one small map per patch, arranged like the patches: (h, w, h, w)."""
    h, w = similarity.shape[:2]
    rows, columns = evenly_spaced_indices(h, MAX_TILES), evenly_spaced_indices(w, MAX_TILES)
    joined, row_centers, column_centers = tile_maps(similarity[np.ix_(rows, columns)])
    lowest, (near, far) = float(similarity.min()), compare_near_and_far(similarity)

    def draw() -> "Figure":
        aspect = joined.shape[0] / joined.shape[1]
        figure = new_figure(FIGURE_WIDTH, float(np.clip(6.8 * aspect, 1.6, 6.2)) + 0.6, "compressed")
        axes = figure.subplots()
        axes.set_facecolor(GRAY)  # shows between the tiles
        image = axes.imshow(joined, **choose_cosine_scale(similarity), interpolation="nearest")
        title = f"how similar the positions of {h}×{w} patches are"
        figure.suptitle(title, fontsize=TITLE_POINTS, x=0.02, ha="left")
        axes.spines[:].set_visible(False)
        for axis, ticks, labels in ((axes.xaxis, column_centers, columns), (axes.yaxis, row_centers, rows)):
            step = -(-len(labels) // 8)
            axis.set_ticks(ticks[::step], [str(each) for each in labels[::step]])
        axes.tick_params(length=0, labelsize=NOTE_POINTS)
        axes.set(xlabel="patch column", ylabel="patch row")
        side = "bottom" if aspect < MIN_ASPECT_OF_BAR else "right"
        figure.colorbar(image, ax=axes, label="cosine similarity", shrink=0.8, ticks=[-1, 0, 1], location=side)
        return figure

    caption = (
        "Cosine similarity of position embeddings. Each tile is the map of all patches for one patch, arranged like the"
        f" patches. The minimum is {lowest:.2f}."
    )
    if min(h, w) < MIN_GRID:
        caption += f" A grid of {h}×{w} is too small to show how similarity falls with distance."
    else:
        caption += f" The mean is {near:.2f} between adjacent patches and {far:.2f} between those further apart."
    if (len(rows), len(columns)) != (h, w):
        caption += f" {len(rows)}×{len(columns)} evenly spaced tiles of {h}×{w} are shown."
    return CaptionedFigure(
        name="position_similarity",
        title="Which positions are similar to the model",
        caption=caption,
        arrays={"similarity": similarity},
        draw=draw,
    )
