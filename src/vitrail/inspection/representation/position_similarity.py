"""Cosine similarity of the position embeddings of patches (Dosovitskiy 2020, figure 7).

E prefix tokens, n = h·w patches, D width.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import DIVERGING_MAP, FIGURE_WIDTH, GREY, NOTE_POINTS, SEQUENTIAL_MAP, TITLE_POINTS
from vitrail.data.images.image_items import evenly_spaced_indices
from vitrail.models.base.contract import ImageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Join tiles (r, c, h, w) into one map with gaps of NaN; also the centres of the rows and columns of tiles."""
    r, c, h, w = tiles.shape
    scale = max(1, 48 // max(h, w))  # so that a gap can be narrower than a cell
    tiles = tiles.repeat(scale, axis=2).repeat(scale, axis=3)
    h, w = h * scale, w * scale
    gap = max(1, max(h, w) // 10)
    padded = np.pad(tiles.astype(np.float64), ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    joined = padded.transpose(0, 2, 1, 3).reshape(r * (h + gap), c * (w + gap))[:-gap, :-gap]
    return joined, (h - 1) / 2 + np.arange(r) * (h + gap), (w - 1) / 2 + np.arange(c) * (w + gap)


def plot_position_similarity(similarity: NDArray[Any]) -> CaptionedFigure:
    """Plot one small map per patch, arranged like the patches: (h, w, h, w)."""
    if similarity.ndim != 4 or similarity.shape[:2] != similarity.shape[2:]:
        raise ConfigError(f"similarities have shape {similarity.shape}; expected (h, w, h, w) of one grid")
    h, w = similarity.shape[:2]
    rows, columns = evenly_spaced_indices(h, MAX_TILES), evenly_spaced_indices(w, MAX_TILES)
    joined, row_centres, column_centres = tile_maps(similarity[np.ix_(rows, columns)])
    lowest, (near, far) = float(similarity.min()), compare_near_and_far(similarity)

    def draw() -> "Figure":
        aspect = joined.shape[0] / joined.shape[1]
        figure = new_figure(FIGURE_WIDTH, float(np.clip(6.8 * aspect, 1.6, 6.2)) + 0.6, "compressed")
        axes = figure.subplots()
        axes.set_facecolor(GREY)  # shows between the tiles
        image = axes.imshow(joined, **choose_cosine_scale(similarity), interpolation="nearest")
        title = f"how similar the positions of {h}×{w} patches are"
        figure.suptitle(title, fontsize=TITLE_POINTS, x=0.02, ha="left")
        axes.spines[:].set_visible(False)
        for axis, ticks, labels in ((axes.xaxis, column_centres, columns), (axes.yaxis, row_centres, rows)):
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
