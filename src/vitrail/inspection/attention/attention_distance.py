"""Mean attention distance of each head in pixels, by depth (Dosovitskiy 2020, figures 7 and 11).

L layers, H heads, N = E + n tokens, E prefix tokens, n = h·w patches of P×Q pixels.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import BLUE, FIGURE_WIDTH, GRAY, LABEL_POINTS, RED
from vitrail.base.text import format_count
from vitrail.models.parts.attention import ReducedGrid
from vitrail.models.parts.windows import Windows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def patch_distances(grid: tuple[int, int], patch: tuple[float, float]) -> NDArray[Any]:
    """Distances between the centers of all patches, in pixels: (n, n)."""
    centers = np.indices(grid).reshape(2, -1).T * np.asarray(patch, dtype=np.float64)  # (n, 2)
    return np.linalg.norm(centers[:, None] - centers, axis=-1)


def attention_distance(maps: NDArray[Any], grid: tuple[int, int], patch: tuple[float, float]) -> NDArray[Any]:
    """Mean distance between query and key patches, weighted by attention, in pixels: (…, H, N, N) → (…, H).

    Prefix tokens, the first E, have no position: their rows and columns are dropped and the remaining rows are
    normalized. Rows without any attention on patches are excluded from the mean; a head with only such rows is NaN.
    """
    prefix = count_prefix_tokens(maps, grid)
    patches = maps[..., prefix:, prefix:]
    patches = patches.astype(np.result_type(patches.dtype, np.float32), copy=False)
    row_sums = patches.sum(-1)  # (…, H, n)
    weighted = np.einsum("...qk,qk->...q", patches, patch_distances(grid, patch).astype(patches.dtype))
    counted = row_sums > 0
    distances = np.divide(weighted, row_sums, out=np.zeros_like(weighted), where=counted)
    rows = counted.sum(-1)
    return np.divide(distances.sum(-1), rows, out=np.full(rows.shape, np.nan, distances.dtype), where=rows > 0)


def window_attention_distance(maps: NDArray[Any], windows: Windows, patch: tuple[float, float]) -> NDArray[Any]:
    """The same for attention within windows, without their padding: (B·W, H, m, m) → (B, H)."""
    real = np.tile(windows.places().numpy(), (len(maps) // math.prod(windows.counts), 1))  # (B·W, m)
    inside = np.where(real[:, None, :, None] & real[:, None, None], maps, 0)
    step = (patch[0] * windows.interval[0], patch[1] * windows.interval[1])
    distances = attention_distance(inside, windows.size, step).reshape(-1, math.prod(windows.counts), maps.shape[1])
    rows = real.reshape(*distances.shape[:2], -1).sum(-1)  # each token counts once, in large windows and small ones
    return np.einsum("bwh,bw->bh", np.nan_to_num(distances), rows) / rows.sum(1, keepdims=True)


def reduced_attention_distance(maps: NDArray[Any], grids: ReducedGrid, image: tuple[int, int]) -> NDArray[Any]:
    """The same for queries and keys on two grids, each at the center of its part of the image: (B, H, n, k) → (B, H).

    Prefix tokens are dropped as above.
    """
    centers = [
        (np.indices(grid).reshape(2, -1).T + 0.5) * (np.asarray(image) / np.asarray(grid))
        for grid in (grids.queries, grids.keys)
    ]
    distances = np.linalg.norm(centers[0][:, None] - centers[1], axis=-1)  # (n, k)
    patches = maps[:, :, -len(centers[0]) :, -len(centers[1]) :]
    weighted = np.einsum("bhqk,qk->bhq", patches, distances.astype(maps.dtype))
    return (weighted / patches.sum(-1)).mean(-1)


def count_prefix_tokens(maps: NDArray[Any], grid: tuple[int, int]) -> int:
    """Number of tokens before the patches, from the size of the maps."""
    patches = grid[0] * grid[1]
    if maps.ndim < 3 or maps.shape[-1] != maps.shape[-2] or maps.shape[-1] < patches:
        raise ConfigError(
            f"attention maps have shape {maps.shape}; expected (…, heads, N, N) with N at least"
            f" {grid[0]}·{grid[1]} = {patches}, with all tokens as queries and as keys"
        )
    return maps.shape[-1] - patches


def uniform_attention_distance(grid: tuple[int, int], patch: tuple[float, float]) -> float:
    """Mean attention distance of uniform attention, in pixels: the reference line of the figure."""
    return float(patch_distances(grid, patch).mean())


def rank_values(values: NDArray[Any]) -> NDArray[Any]:
    """Ranks from 0 for the smallest value; equal values get the mean of their ranks."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[which]


def correlate_ranks(one: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Spearman's rank correlation; None if all values of one are equal."""
    a, b = (rank_values(each) - (len(each) - 1) / 2 for each in (one, other))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else None


def correlate_ranks_with_depth(values: NDArray[Any]) -> float:
    """Spearman correlation of a value per layer with depth, NaN if the value is constant: (L,) → ()."""
    values = values[~np.isnan(values)]
    correlation = correlate_ranks(values, np.arange(len(values)))
    return float("nan") if correlation is None else correlation


def draw_attention_distance(
    distances: NDArray[Any], *, images: int, image_size: tuple[int, int], even: float
) -> CaptionedFigure:
    """Plot one dot per head, the mean over heads and the distance `even` of uniform attention: (L, H)."""
    counts = (~np.isnan(distances)).sum(-1)
    means = np.divide(np.nansum(distances, -1), counts, out=np.full(len(counts), np.nan), where=counts > 0)
    layers, heads = distances.shape
    sample = f"{format_count(images, 'image')} of {image_size[0]}×{image_size[1]} pixels"

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, 4.4)
        axes = figure.subplots()
        depth = np.repeat(np.arange(layers), heads)
        axes.scatter(depth, distances.ravel(), s=22, color=BLUE, alpha=0.65, linewidths=0, label="one head")
        axes.plot(np.arange(layers), means, color=RED, linewidth=1.8, marker="_", label="mean over heads")
        axes.axhline(even, color=GRAY, linewidth=1.2, linestyle="--", label="uniform attention")
        style_axes(axes, f"how far each head attends, {sample}")
        axes.set(xlabel="layer", ylabel="distance (pixels)", xlim=(-0.5, layers - 0.5))
        axes.set_ylim(0, 1.08 * np.nanmax([*means, *distances.ravel(), even, 1e-6]))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.25, linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=LABEL_POINTS)
        return figure

    caption = (
        f"Mean attention distance of each head (dots) by layer, averaged over {sample}."
        f" Uniform attention has a distance of {even:.1f} pixels (dashed line)."
        f" The mean over heads is {means[0]:.1f} pixels in layer 0 and {means[-1]:.1f} pixels in layer {layers - 1}."
        " Only attention between patches is counted: prefix tokens are excluded and each row is renormalized."
    )
    if not np.isnan(correlation := correlate_ranks_with_depth(means)):
        caption += f" The rank correlation between this mean and depth is {correlation:.2f}."
    return CaptionedFigure(
        name="attention_distance",
        title="How far each head attends",
        caption=caption,
        arrays={"distances": distances},
        draw=draw,
    )
