"""What each head of a layer attends to, as in the figures of DINO (Caron 2021): a map or a mask per head, and the mean.

H heads, h·w patches.
"""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.figures import new_figure, sanitize_label
from vitrail.base.style import FIGURE_WIDTH, LABEL_POINTS
from vitrail.inspection.explain.overlay import (
    BRIGHTEST_QUANTILE,
    COLOUR_BAR_WIDTH,
    PixelBox,
    draw_map_over_photo,
    draw_outline,
    draw_patch_outlines,
    draw_photo,
    draw_scale,
    find_strongest,
    fit_font_size,
    locate_patch_in_photo,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_PER_ROW = (4, 5, 6)  # the one that leaves the fewest empty
MASK_SCALE = 16  # a mask is drawn with sharp edges: each patch of so many pixels


def mask_by_mass(maps: NDArray[Any], mass: float) -> NDArray[np.bool_]:
    """The fewest patches that hold at least this share of a map: (…, h, w)."""
    flat = maps.reshape(*maps.shape[:-2], -1)
    order = np.argsort(-flat, axis=-1, kind="stable")
    ordered = np.take_along_axis(flat, order, -1)
    before = np.cumsum(ordered, -1) - ordered  # what the larger ones hold
    kept = np.zeros(flat.shape, bool)
    np.put_along_axis(kept, order, before < mass * flat.sum(-1, keepdims=True), -1)
    return kept.reshape(maps.shape)


def draw_heads(
    photo: NDArray[np.uint8],
    box: PixelBox,
    maps: NDArray[Any],
    mean: NDArray[Any],
    heading: str,
    *,
    mass: float | None = None,
    patch: Sequence[int] | None = None,
) -> "Figure":
    """The photo, the mean over the heads and each head (H, h, w), on one scale; with `mass`, masks instead of maps.

    `patch` is the row and column of the query patch, which is outlined.
    """
    names = ["dashed: what it sees", "mean over heads", *(f"head {number}" for number in range(len(maps)))]
    columns = min(PANELS_PER_ROW, key=lambda each: (-len(names) % each, -each))
    columns = min(columns, len(names))
    rows = ceil(len(names) / columns)
    reserved = 0.1 if mass is not None else COLOUR_BAR_WIDTH + 0.2
    aspect = min(max(photo.shape[0] / photo.shape[1], 0.3), 3.0)
    width = (FIGURE_WIDTH - reserved) / columns
    figure = new_figure(FIGURE_WIDTH, rows * (width * aspect + 0.27) + 0.5)
    grid: list[Any] = np.asarray(figure.subplots(rows, columns, squeeze=False)).ravel().tolist()
    panels = np.stack([mean, *maps]) * mean.size  # 1 is uniform attention
    limits = (0.0, float(np.quantile(panels, BRIGHTEST_QUANTILE)) or 1.0)
    masks = None if mass is None else mask_by_mass(np.stack([mean, *maps]), mass)
    draw_photo(grid[0], photo, photo.shape)
    draw_outline(grid[0], box)
    for number, axes in enumerate(grid[1 : len(names)]):
        if masks is None:
            draw_map_over_photo(axes, photo, box, panels[number], limits)
            draw_patch_outlines(axes, box, find_strongest(panels[number]))
        else:
            draw_map_over_photo(axes, photo, box, enlarge(masks[number]), (0.0, 1.0))
            draw_patch_outlines(axes, box, masks[number])
        if patch is not None:
            draw_outline(axes, locate_patch_in_photo(box, mean.shape, patch))
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(name, fontsize=LABEL_POINTS)
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    if masks is None:
        shrink = min(0.85, 6 / figure.get_figheight())
        draw_scale(figure, grid, limits, "attention (1 = average)", shrink=shrink, open_end=limits[1] < panels.max())
    line = sanitize_label(heading, int(9 * FIGURE_WIDTH))
    figure.suptitle(line, fontsize=fit_font_size(line, FIGURE_WIDTH), x=0.01, ha="left", parse_math=False)
    return figure


def enlarge(masks: NDArray[np.bool_]) -> NDArray[np.float32]:
    return masks.astype(np.float32).repeat(MASK_SCALE, -2).repeat(MASK_SCALE, -1)
