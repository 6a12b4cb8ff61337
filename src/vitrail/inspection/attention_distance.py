"""How far a head looks: the mean attention distance in pixels, by depth (Dosovitskiy 2020, figures 7 and 11).

L layers, H heads, N = E + n tokens, E prefix tokens, n = h·w patches of P×Q pixels.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError
from vitrail.figures import BLUE, GREY, RED, CaptionedFigure, new_figure, pluralize, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def patch_distances(grid: tuple[int, int], patch: tuple[float, float]) -> NDArray[Any]:
    """Between the centres of all patches, in pixels: (n, n)."""
    centres = np.indices(grid).reshape(2, -1).T * np.asarray(patch, dtype=np.float64)  # (n, 2)
    return np.linalg.norm(centres[:, None] - centres, axis=-1)


def attention_distance(maps: NDArray[Any], grid: tuple[int, int], patch: tuple[float, float]) -> NDArray[Any]:
    """Mean distance in pixels from a patch to what it attends to: (…, H, N, N) → (…, H).

    Prefix tokens, the first E, are nowhere: their rows and columns are dropped, and what is left of a row is divided by
    its sum. A row that gave nothing to patches is left out of the mean; a head with no other row is NaN.
    """
    prefix = count_prefix_tokens(maps, grid)
    patches = maps[..., prefix:, prefix:]
    patches = patches.astype(np.result_type(patches.dtype, np.float32), copy=False)
    given = patches.sum(-1)  # (…, H, n): what a row gives to patches
    reached = np.einsum("...qk,qk->...q", patches, patch_distances(grid, patch).astype(patches.dtype))
    counted = given > 0
    distances = np.divide(reached, given, out=np.zeros_like(reached), where=counted)
    rows = counted.sum(-1)
    return np.divide(distances.sum(-1), rows, out=np.full(rows.shape, np.nan, distances.dtype), where=rows > 0)


def count_prefix_tokens(maps: NDArray[Any], grid: tuple[int, int]) -> int:
    """How many of the tokens are prefix tokens."""
    patches = grid[0] * grid[1]
    if maps.ndim < 3 or maps.shape[-1] != maps.shape[-2] or maps.shape[-1] < patches:
        raise ConfigError(
            f"attention maps of the shape {maps.shape}; expected (…, heads, N, N) with N at least"
            f" {grid[0]}·{grid[1]} = {patches}: all tokens as queries and as keys"
        )
    return maps.shape[-1] - patches


def uniform_attention_distance(grid: tuple[int, int], patch: tuple[float, float]) -> float:
    """Of attention that is spread evenly over the image: what a head without any preference reaches."""
    return float(patch_distances(grid, patch).mean())


def rank_values(values: NDArray[Any]) -> NDArray[Any]:
    """From 0 for the least; equal values share the mean of their ranks."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[which]


def rank_correlation(values: NDArray[Any]) -> float:
    """Spearman's, of a value by layer with depth: 1 where it only rises; NaN where it does not change: (L,) → ()."""
    values = values[~np.isnan(values)]
    a, b = rank_values(values), np.arange(len(values), dtype=np.float64)
    if len(values) < 2 or np.ptp(a) == 0:
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def plot_attention_distance(
    distances: NDArray[Any], *, images: int, image_size: tuple[int, int], even: float
) -> CaptionedFigure:
    """One dot a head, their mean as a line, and the distance of evenly spread attention as another: (L, H)."""
    if distances.ndim != 2 or not distances.size:
        raise ConfigError(f"distances of the shape {distances.shape}; expected (layers, heads), one of each at least")
    counts = (~np.isnan(distances)).sum(-1)
    means = np.divide(np.nansum(distances, -1), counts, out=np.full(len(counts), np.nan), where=counts > 0)
    layers, heads = distances.shape
    over = f"{pluralize(images, 'image')} of {image_size[0]}×{image_size[1]} pixels"

    def draw() -> "Figure":
        figure = new_figure(7.2, 4.4)
        axes = figure.subplots()
        depth = np.repeat(np.arange(layers), heads)
        axes.scatter(depth, distances.ravel(), s=22, color=BLUE, alpha=0.65, linewidths=0, label="one head")
        axes.plot(np.arange(layers), means, color=RED, linewidth=1.8, marker="_", label="mean of the heads")
        axes.axhline(even, color=GREY, linewidth=1.2, linestyle="--", label="evenly spread attention")
        style_axes(axes, f"mean attention distance, {over}")
        axes.set(xlabel="layer, from 0", ylabel="distance (pixels)", xlim=(-0.5, layers - 0.5))
        axes.set_ylim(0, 1.08 * np.nanmax([*means, *distances.ravel(), even, 1e-6]))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.25, linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return figure

    caption = (
        f"How far from itself a patch looks, on average over {over}: one dot for each head, by layer."
        f" Attention spread evenly over the image would reach {even:.1f} pixels."
        f" The mean of the heads is {means[0]:.1f} pixels in layer 0 and {means[-1]:.1f} in layer {layers - 1}."
        " Only attention between patches counts: prefix tokens are left out, and the rest of each row sums to 1."
    )
    if not np.isnan(correlation := rank_correlation(means)):
        caption += f" The rank correlation of the mean with depth is {correlation:.2f}."
    return CaptionedFigure(
        name="attention_distance",
        title="Mean attention distance",
        caption=caption,
        arrays={"distances": distances},
        draw=draw,
    )
