"""Draw maps over the photo that they explain, in the photo's aspect ratio."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.figures import COLOUR_MAP, new_figure, sanitize_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PHOTO_SIDE = 512  # pixels in a figure
PANEL_WIDTH = 3.4  # inches
MAX_WIDE_PANELS = 4  # more panels per row are narrower
MAX_FIGURE_HEIGHT = 20  # inches, unless panels would become too small
BRIGHTEST_QUANTILE = 0.99  # top of the colour scale of several maps, so that outliers do not darken the rest
PixelBox = tuple[float, float, float, float]  # left, top, right, bottom


def shrink_photo_and_box(photo: Image.Image, box: PixelBox) -> tuple[NDArray[np.uint8], PixelBox]:
    """Downscale a photo to the size of a figure, and the box of what the model receives with it."""
    scale = min(1.0, MAX_PHOTO_SIDE / max(photo.size))
    if scale < 1:
        size = (max(1, round(photo.width * scale)), max(1, round(photo.height * scale)))
        across, down = size[0] / photo.width, size[1] / photo.height
        photo, box = photo.resize(size), (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    return np.asarray(photo.convert("RGB")), box


def draw_overlay(
    photo: NDArray[np.uint8],
    box: PixelBox,
    panels: NDArray[Any],
    titles: Sequence[Sequence[str]],
    heading: str,
    unit: str,
    patch: Sequence[int] | None = None,
) -> "Figure":
    """Draw each map (rows, columns, h, w) over the photo; next to a single map also the photo alone.

    `patch` is the row and column of the query patch, which is outlined.
    """
    flat, names = [panel for row in panels for panel in row], [title for row in titles for title in row]
    single, columns = len(flat) == 1, panels.shape[1]
    if columns == 1:  # wrap a single column of maps into rows
        columns = 2 if single else min(len(flat), MAX_WIDE_PANELS)
    rows = -(-len(flat) // columns)
    width = PANEL_WIDTH if columns <= MAX_WIDE_PANELS else max(1.0, MAX_WIDE_PANELS * PANEL_WIDTH / columns)
    aspect = min(max(photo.shape[0] / photo.shape[1], 0.3), 3.0)
    width = min(width, max(1.3, (MAX_FIGURE_HEIGHT / rows - 0.25) / aspect))
    height = rows * (width * aspect + 0.25) + 0.5
    figure = new_figure(columns * width + 0.9, height)
    grid: list[Any] = np.asarray(figure.subplots(rows, columns, squeeze=False)).ravel().tolist()
    if single:
        draw_photo(grid[0], photo)
        draw_outline(grid[0], box)
        grid[0].set_title("model input", fontsize=9)
    low, highest = float(panels.min()), float(panels.max())
    high = highest if single else float(np.quantile(panels, BRIGHTEST_QUANTILE))
    limits = (low, high if high > low else low + 1)
    drawn: Any = None
    for axes, panel, name in zip(grid[single:], flat, names, strict=False):
        drawn = draw_map_over_photo(axes, photo, box, panel, limits)
        if patch is not None:
            draw_outline(axes, locate_patch_in_photo(box, panel.shape, patch))
        axes.set_title(name, fontsize=9 if width > 2 else 7)
    for axes in grid[len(flat) + single :]:
        axes.set_axis_off()
    shrink, extend = min(0.85, 6 / height), "max" if low < high < highest else "neither"
    figure.colorbar(drawn, ax=grid, shrink=shrink, aspect=30, anchor=(0, 0.5), label=unit, extend=extend)
    line = shorten_heading(heading, int(9 * figure.get_figwidth()))  # 9 characters per inch
    figure.suptitle(line, fontsize=fit_font_size(line, figure.get_figwidth()), x=0.01, ha="left", parse_math=False)
    return figure


def shorten_heading(heading: str, max_length: int) -> str:
    """Cut a heading in the class name, in the middle: the probability and the method at the end stay."""
    start = max_length // 3
    ends = heading if len(heading) <= max_length else f"{heading[:start]}…{heading[start + 1 - max_length :]}"
    return sanitize_label(ends, max_length)


def fit_font_size(line: str, inches: float, points: float = 11.0) -> float:
    """Font size in points at which the line fits into the width."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    font.set_size(points, 72)
    font.set_text(line)
    return points * min(1.0, 0.97 * inches / (font.get_width_height()[0] / 64 / 72 or 1))


def draw_photo(axes: Any, photo: NDArray[np.uint8]) -> None:
    axes.imshow(photo)
    axes.set(xlim=(-0.5, photo.shape[1] - 0.5), ylim=(photo.shape[0] - 0.5, -0.5), xticks=[], yticks=[])


def draw_map_over_photo(
    axes: Any, photo: NDArray[np.uint8], box: PixelBox, panel: NDArray[Any], limits: tuple[float, float]
) -> Any:
    """Draw a map (h, w) over the photo, with colours scaled to the limits."""
    draw_photo(axes, photo)
    left, top, right, bottom = (edge - 0.5 for edge in box)  # pixel centres are at integers
    low, high = limits
    extent = (left, right, bottom, top)
    return axes.imshow(panel, cmap=COLOUR_MAP, vmin=low, vmax=high, alpha=0.65, interpolation="bilinear", extent=extent)


def locate_patch_in_photo(box: PixelBox, grid: Sequence[int], patch: Sequence[int]) -> PixelBox:
    """Box of a patch, given by row and column, in the photo."""
    left, top, right, bottom = box
    height, width = (bottom - top) / grid[0], (right - left) / grid[1]
    corner = left + patch[1] * width, top + patch[0] * height
    return *corner, corner[0] + width, corner[1] + height


def draw_outline(axes: Any, box: PixelBox) -> None:
    """Outline a box in white and black, visible on any background."""
    left, top, right, bottom = (edge - 0.5 for edge in box)
    xs, ys = (left, right, right, left, left), (top, top, bottom, bottom, top)
    axes.plot(xs, ys, color="white", linewidth=1.6)
    axes.plot(xs, ys, color="black", linewidth=0.8, linestyle="--")
