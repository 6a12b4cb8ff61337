"""What a model knows of places: how alike the position embeddings of its patches are (Dosovitskiy 2020, figure 7).

E prefix tokens, n = h·w patches, D width.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.image_items import evenly_spaced_indices
from vitrail.errors import ConfigError
from vitrail.figures import COLOUR_MAP, CaptionedFigure, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TILES = 16  # tiles along an axis


def find_position_table(model: nn.Module) -> NDArray[Any] | None:
    """What is added to the patches for their places before the first layer, (n, D); None where nothing is added."""
    grid, tables = getattr(model, "grid", None), getattr(model, "tables", None)
    if grid is None:
        return None
    table: Any = tables(grid) if callable(tables) else getattr(model, "pos_embed", None)
    if not isinstance(table, Tensor):
        return None
    return table[0, -grid[0] * grid[1] :].detach().cpu().float().numpy()


def position_similarity(table: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any]:
    """Cosine of every patch's row with every other's, 0 to a row of zeros: (n, D) → (h, w, h, w)."""
    if table.ndim != 2 or len(table) != grid[0] * grid[1]:
        raise ConfigError(
            f"a position table of the shape {table.shape}; expected one row for each of the"
            f" {grid[0]}·{grid[1]} = {grid[0] * grid[1]} patches, without those of prefix tokens"
        )
    lengths = np.linalg.norm(table, axis=-1, keepdims=True)
    unit = table / np.where(lengths > 0, lengths, 1)
    return (unit @ unit.T).clip(-1, 1).reshape(*grid, *grid)


def tile_maps(tiles: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Tiles (r, c, h, w) as one map with gaps of NaN, and where the centres of its rows and columns of tiles are."""
    r, c, h, w = tiles.shape
    fine = max(1, 48 // max(h, w))  # so that a gap can be narrower than a cell
    tiles = tiles.repeat(fine, axis=2).repeat(fine, axis=3)
    h, w = h * fine, w * fine
    gap = max(1, max(h, w) // 10)
    padded = np.pad(tiles.astype(np.float64), ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    whole = padded.transpose(0, 2, 1, 3).reshape(r * (h + gap), c * (w + gap))[:-gap, :-gap]
    return whole, (h - 1) / 2 + np.arange(r) * (h + gap), (w - 1) / 2 + np.arange(c) * (w + gap)


def plot_position_similarity(similarity: NDArray[Any]) -> CaptionedFigure:
    """One small map a patch, laid out as the patches are: (h, w, h, w)."""
    if similarity.ndim != 4 or similarity.shape[:2] != similarity.shape[2:]:
        raise ConfigError(f"similarities of the shape {similarity.shape}; expected (h, w, h, w), of a grid with itself")
    h, w = similarity.shape[:2]
    rows, columns = evenly_spaced_indices(h, MAX_TILES), evenly_spaced_indices(w, MAX_TILES)
    whole, middles, centres = tile_maps(similarity[np.ix_(rows, columns)])
    lowest = float(similarity.min())

    def draw() -> "Figure":
        tall = whole.shape[0] / whole.shape[1]
        wide = float(np.clip(6.2 / tall, 2.6, 6.2) if tall > 1 else 6.2)
        figure = new_figure(wide + 1.4, float(np.clip(wide * tall, 1.6, 6.2)) + 0.6)
        axes = figure.subplots()
        image = axes.imshow(whole, cmap=COLOUR_MAP, vmin=min(0.0, lowest), vmax=1, interpolation="nearest")
        figure.suptitle(f"position similarity, {h}×{w} patches", fontsize=11, x=0.02, ha="left")
        axes.spines[:].set_visible(False)
        for axis, ticks, named in ((axes.xaxis, centres, columns), (axes.yaxis, middles, rows)):
            step = -(-len(named) // 8)
            axis.set_ticks(ticks[::step], [str(each) for each in named[::step]])
        axes.tick_params(length=0, labelsize=8)
        axes.set(xlabel="column of the patch, from 0", ylabel="row of the patch, from 0")
        figure.colorbar(image, ax=axes, label="cosine", shrink=0.8, ticks=[-1, -0.5, 0, 0.5, 1])
        return figure

    caption = (
        f"The cosine of the position embedding of each patch with those of all others: one small map of {h}×{w} patches"
        f" for each patch, laid out as the patches are; bright is alike. The least is {lowest:.2f}."
    )
    if (len(rows), len(columns)) != (h, w):
        caption += f" Of the {h}×{w} maps, {len(rows)}×{len(columns)} are drawn, evenly spread."
    return CaptionedFigure(
        name="position_similarity",
        title="Similarity of position embeddings",
        caption=caption,
        arrays={"similarity": similarity},
        draw=draw,
    )
