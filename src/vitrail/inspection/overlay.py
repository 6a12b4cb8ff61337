"""Maps over the photo that they explain, in the photo's own aspect."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.figures import COLOUR_MAP, new_figure, sanitize_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PHOTO_SIDE = 512  # side of a photo in a figure, in pixels
PANEL_WIDTH = 3.4  # of one panel, in inches
MAX_WIDE_PANELS = 4  # panels of that width
MAX_FIGURE_HEIGHT = 20  # of a figure, in inches, unless its panels would become too small
BRIGHTEST_QUANTILE = 0.99  # of the values of many maps: the few above are as bright, or all else would be dark
PixelBox = tuple[float, float, float, float]  # left, top, right, bottom


def shrink_photo(photo: Image.Image, box: PixelBox) -> tuple[NDArray[np.uint8], PixelBox]:
    """The photo no larger than figures need, and the box that the model sees of it in the new pixels."""
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
    """The photo under each map, (rows, columns, h, w); a map alone has the photo beside it.

    `patch` is the row and the column of the one that attends, which is marked.
    """
    flat, names = [panel for row in panels for panel in row], [title for row in titles for title in row]
    alone, across = len(flat) == 1, panels.shape[1]
    if across == 1:  # a column is laid out like a page
        across = 2 if alone else min(len(flat), MAX_WIDE_PANELS)
    rows = -(-len(flat) // across)
    small = PANEL_WIDTH if across <= MAX_WIDE_PANELS else max(1.0, MAX_WIDE_PANELS * PANEL_WIDTH / across)
    aspect = min(max(photo.shape[0] / photo.shape[1], 0.3), 3.0)
    small = min(small, max(1.3, (MAX_FIGURE_HEIGHT / rows - 0.25) / aspect))
    height = rows * (small * aspect + 0.25) + 0.5
    figure = new_figure(across * small + 0.9, height)
    grid: list[Any] = np.asarray(figure.subplots(rows, across, squeeze=False)).ravel().tolist()
    if alone:
        draw_photo(grid[0], photo)
        draw_outline(grid[0], box)
        grid[0].set_title("what the model sees", fontsize=9)
    low, most = float(panels.min()), float(panels.max())
    high = most if alone else float(np.quantile(panels, BRIGHTEST_QUANTILE))
    limits = (low, high if high > low else low + 1)
    drawn: Any = None
    for axes, panel, name in zip(grid[alone:], flat, names, strict=False):
        drawn = draw_map_over_photo(axes, photo, box, panel, limits)
        if patch is not None:
            draw_outline(axes, patch_box(box, panel.shape, patch))
        axes.set_title(name, fontsize=9 if small > 2 else 7)
    for axes in grid[len(flat) + alone :]:
        axes.set_axis_off()
    shrink, beyond = min(0.85, 6 / height), "max" if low < high < most else "neither"
    figure.colorbar(drawn, ax=grid, shrink=shrink, aspect=30, anchor=(0, 0.5), label=unit, extend=beyond)
    line = shorten_heading(heading, int(9 * figure.get_figwidth()))  # letters to an inch
    figure.suptitle(line, fontsize=fit_font_size(line, figure.get_figwidth()), x=0.01, ha="left", parse_math=False)
    return figure


def shorten_heading(heading: str, most: int) -> str:
    """Cut in its middle, which is in the class's name: how probable it is and what is drawn come last."""
    ends = heading if len(heading) <= most else f"{heading[: most // 3]}…{heading[most // 3 + 1 - most :]}"
    return sanitize_label(ends, most)


def fit_font_size(line: str, inches: float, points: float = 11.0) -> float:
    """The size of its letters, smaller where they are wide ones."""
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
    """The photo under a map (h, w), whose least and greatest colours are at the limits."""
    draw_photo(axes, photo)
    left, top, right, bottom = (edge - 0.5 for edge in box)  # a pixel reaches from − ½ to ½
    low, high = limits
    extent = (left, right, bottom, top)
    return axes.imshow(panel, cmap=COLOUR_MAP, vmin=low, vmax=high, alpha=0.65, interpolation="bilinear", extent=extent)


def patch_box(box: PixelBox, grid: Sequence[int], patch: Sequence[int]) -> PixelBox:
    """Where in the photo the patch of that row and column is."""
    left, top, right, bottom = box
    deep, wide = (bottom - top) / grid[0], (right - left) / grid[1]
    corner = left + patch[1] * wide, top + patch[0] * deep
    return *corner, corner[0] + wide, corner[1] + deep


def draw_outline(axes: Any, box: PixelBox) -> None:
    """To be seen on any ground."""
    left, top, right, bottom = (edge - 0.5 for edge in box)
    xs, ys = (left, right, right, left, left), (top, top, bottom, bottom, top)
    axes.plot(xs, ys, color="white", linewidth=1.6)
    axes.plot(xs, ys, color="black", linewidth=0.8, linestyle="--")
