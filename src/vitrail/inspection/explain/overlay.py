"""Draw maps over the photo that they explain: it is bright where the model attends, and gray and dark elsewhere.

Bright and dark are ambiguous on white and black parts, so the strongest patches have an outline too.
"""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.figures import measure_text, new_figure, sanitize_label
from vitrail.base.style import BLUE, FIGURE_WIDTH, GRAY, LABEL_POINTS, NOTE_POINTS, PALE
from vitrail.base.text import format_probability

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PHOTO_SIDE = 512  # pixels in a figure
MAX_WIDE_PANELS = 4  # panels per row if there is one column of maps
MIN_PANEL_WIDTH = 1.0  # inches
MAX_PHOTO_HEIGHT = 4.2  # inches, of a single map
MAX_FIGURE_HEIGHT = 20  # inches, unless panels would become too small
COLOR_BAR_WIDTH, PREDICTIONS_WIDTH = 0.9, 2.3  # inches
BRIGHTEST_QUANTILE = 0.95  # end of the scale, so that single patches do not darken the rest
OUTLINED_SHARE = 0.05  # of the patches, the strongest ones
MIN_BLENDED_SIDE = 384  # pixels: a map over a smaller photo would be coarse
SHADE, GLOW = np.array((0.03, 0.04, 0.06)), np.array((0.3, 0.17, 0.04))  # of what is not attended, and of what is
PixelBox = tuple[float, float, float, float]  # left, top, right, bottom
TopClass = tuple[str, float, bool]  # name, probability, whether it is the explained class


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
    *,
    patch: Sequence[int] | None = None,
    lowest: float | None = None,
    predictions: Sequence[TopClass] = (),
) -> "Figure":
    """Draw each map (rows, columns, h, w) over the photo; next to a single map also the photo and the top classes.

    `patch` is the row and column of the query patch, which is outlined; `lowest` is the start of the scale, by default
    the smallest value. Its end is the 95% quantile.
    """
    flat, names = [panel for row in panels for panel in row], [title for row in titles for title in row]
    single, columns = len(flat) == 1, panels.shape[1]
    if columns == 1:  # wrap a single column of maps into rows
        columns = 2 if single else min(len(flat), MAX_WIDE_PANELS)
    rows, predictions = -(-len(flat) // columns), predictions if single else ()
    reserved = COLOR_BAR_WIDTH + PREDICTIONS_WIDTH * bool(predictions)
    aspect = min(max(photo.shape[0] / photo.shape[1], 0.3), 3.0)
    limit = MAX_PHOTO_HEIGHT if single else max(1.3 * aspect, MAX_FIGURE_HEIGHT / rows - 0.25)
    width = min(max((FIGURE_WIDTH - reserved) / columns, MIN_PANEL_WIDTH), limit / aspect)
    height = max(rows * (width * aspect + 0.25) + 0.5, 2.5 * bool(predictions))
    figure = new_figure(max(FIGURE_WIDTH, columns * width + COLOR_BAR_WIDTH), height)
    ratios = [width] * columns + [FIGURE_WIDTH - COLOR_BAR_WIDTH - columns * width] * bool(predictions)
    grid: list[Any] = (
        np.asarray(figure.subplots(rows, len(ratios), squeeze=False, width_ratios=ratios)).ravel().tolist()
    )
    if predictions:
        plot_predictions(grid.pop(), predictions)
    if single:
        plot_photo(grid[0], photo, photo.shape)
        plot_outline(grid[0], box)
        grid[0].set_title("dashed: what it sees", fontsize=LABEL_POINTS)
    low, high = float(panels.min()) if lowest is None else lowest, float(np.quantile(panels, BRIGHTEST_QUANTILE))
    high = high if high > low else float(panels.max())  # nearly all values may be equal
    limits = (low, high if high > low else low + 1)
    for axes, panel, name in zip(grid[single:], flat, names, strict=False):
        plot_map_over_photo(axes, photo, box, panel, limits)
        plot_patch_outlines(axes, box, find_strongest(panel))
        if patch is not None:
            plot_outline(axes, locate_patch_in_photo(box, panel.shape, patch))
        axes.set_title(name, fontsize=LABEL_POINTS if width > 2 else 7)
    for axes in grid[len(flat) + single :]:
        axes.set_axis_off()
    plot_scale(figure, grid, limits, unit, shrink=min(0.85, 6 / height), open_end=limits[1] < panels.max())
    line = sanitize_label(heading, int(9 * figure.get_figwidth()))  # 9 characters per inch
    figure.suptitle(line, fontsize=fit_font_size(line, figure.get_figwidth()), x=0.01, ha="left", parse_math=False)
    return figure


def fit_font_size(line: str, inches: float, points: float = 11.0) -> float:
    """Font size in points at which the line fits into the width."""
    return points * min(1.0, 0.94 * inches / (measure_text(line, points) or 1))


def blend(photo: NDArray[Any], strength: NDArray[Any]) -> NDArray[Any]:
    """Dim the photo (…, 3) to dark gray where the strength (…) is 0, add a warm glow where it is 1; both are 0 to 1."""
    share = strength[..., None]
    gray = photo.mean(-1, keepdims=True) * 0.38 + SHADE
    glow = share**2 * GLOW * (1.6 - photo.mean(-1, keepdims=True))  # stronger on dark parts, where it is all there is
    return np.clip(share * photo + (1 - share) * gray + glow, 0, 1)


def plot_scale(
    figure: "Figure", grid: Sequence[Any], limits: tuple[float, float], unit: str, *, shrink: float, open_end: bool
) -> None:
    """Draw the bar of the scale; with an open end if some values are larger."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    colors = blend(np.full((256, 3), (0.75, 0.7, 0.65)), np.linspace(0, 1, 256))  # of a photo of one color
    scale = ScalarMappable(Normalize(*limits), ListedColormap(colors))
    extend = "max" if open_end else "neither"
    bar = figure.colorbar(scale, ax=[*grid], shrink=shrink, aspect=30, anchor=(0, 0.5), extend=extend)
    bar.set_label(f"{unit}\noutlined: the strongest {OUTLINED_SHARE:.0%}", fontsize=NOTE_POINTS)
    bar.ax.tick_params(labelsize=NOTE_POINTS)


def plot_photo(axes: Any, photo: NDArray[Any], size: Sequence[int]) -> None:
    """Draw a photo on axes that count the pixels of `size`, rows and columns; their centers are at integers."""
    rows, columns = size[0], size[1]
    axes.imshow(photo, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5))
    axes.set(xticks=[], yticks=[])


def plot_map_over_photo(
    axes: Any, photo: NDArray[np.uint8], box: PixelBox, panel: NDArray[Any], limits: tuple[float, float]
) -> None:
    """Draw a map (h, w) over the photo, scaled to the limits."""
    plot_photo(axes, blend_map_with_photo(photo, box, panel, limits), photo.shape)


def blend_map_with_photo(
    photo: NDArray[np.uint8], box: PixelBox, panel: NDArray[Any], limits: tuple[float, float]
) -> NDArray[Any]:
    """The photo with the map (h, w), smoothly resized to the box; outside, where the model sees nothing, it is gray."""
    factor = max(1, -(-MIN_BLENDED_SIDE // max(photo.shape[:2])))
    large = photo.repeat(factor, 0).repeat(factor, 1) / 255
    left, top, right, bottom = (round(factor * edge) for edge in box)
    size = (max(1, right - left), max(1, bottom - top))
    resized = np.asarray(Image.fromarray(panel.astype(np.float32)).resize(size, Image.Resampling.BICUBIC))
    strength = np.clip((resized - limits[0]) / (limits[1] - limits[0]), 0, 1)
    result = 0.62 + 0.12 * large  # gray, so that it does not look attended
    inside = result[max(0, top) : top + size[1], max(0, left) : left + size[0]]
    strength = strength[max(0, -top) :, max(0, -left) :][: inside.shape[0], : inside.shape[1]]
    pixels = large[max(0, top) : top + size[1], max(0, left) : left + size[0]]
    inside[:] = blend(pixels, strength)
    return result


def plot_predictions(axes: Any, predictions: Sequence[TopClass]) -> None:
    """Draw a bar per class with its name and probability above it."""
    for row, (name, probability, is_explained) in enumerate(predictions):
        axes.barh(row, 1, 0.24, color=PALE, alpha=0.5)
        axes.barh(row, probability, 0.24, color=BLUE if is_explained else GRAY)
        axes.text(0, row - 0.2, sanitize_label(name, 26), fontsize=NOTE_POINTS, va="bottom", parse_math=False)
        axes.text(1, row - 0.2, format_probability(probability), fontsize=NOTE_POINTS, va="bottom", ha="right")
    axes.set(xlim=(-0.06, 1), ylim=(max(len(predictions), 3) - 0.6, -0.75))
    axes.set_axis_off()
    axes.set_title("prediction", fontsize=LABEL_POINTS)


def locate_patch_in_photo(box: PixelBox, grid: Sequence[int], patch: Sequence[int]) -> PixelBox:
    """Box of a patch, given by row and column, in the photo."""
    left, top, right, bottom = box
    height, width = (bottom - top) / grid[0], (right - left) / grid[1]
    corner = left + patch[1] * width, top + patch[0] * height
    return *corner, corner[0] + width, corner[1] + height


def find_strongest(panel: NDArray[Any]) -> NDArray[np.bool_]:
    """The patches (h, w) with the largest values, 5% of them but at least one; none if all are equal."""
    return (panel >= np.quantile(panel, 1 - OUTLINED_SHARE)) & (panel > panel.min())


def plot_patch_outlines(axes: Any, box: PixelBox, chosen: NDArray[np.bool_]) -> None:
    """Draw the edges between chosen patches (h, w) and others, in white on black: visible on any background."""
    from matplotlib.collections import LineCollection

    padded, (h, w) = np.pad(chosen, 1), chosen.shape
    across = [((c, r), (c + 1, r)) for r, c in np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])]
    down = [((c, r), (c, r + 1)) for r, c in np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])]
    left, top, right, bottom = box
    segments = np.array([*across, *down]).reshape(-1, 2, 2) * ((right - left) / w, (bottom - top) / h)
    segments += (left - 0.5, top - 0.5)
    for color, width in (("black", 1.6), ("white", 0.8)):
        lines = LineCollection(list(segments), colors=color, linewidths=width, capstyle="round")
        axes.add_collection(lines, autolim=False)


def plot_outline(axes: Any, box: PixelBox) -> None:
    """Outline a box in white and black, visible on any background."""
    left, top, right, bottom = (edge - 0.5 for edge in box)
    xs, ys = (left, right, right, left, left), (top, top, bottom, bottom, top)
    axes.plot(xs, ys, color="white", linewidth=1.6)
    axes.plot(xs, ys, color="black", linewidth=0.8, linestyle="--")


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
    reserved = 0.1 if mass is not None else COLOR_BAR_WIDTH + 0.2
    aspect = min(max(photo.shape[0] / photo.shape[1], 0.3), 3.0)
    width = (FIGURE_WIDTH - reserved) / columns
    figure = new_figure(FIGURE_WIDTH, rows * (width * aspect + 0.27) + 0.5)
    grid: list[Any] = np.asarray(figure.subplots(rows, columns, squeeze=False)).ravel().tolist()
    panels = np.stack([mean, *maps]) * mean.size  # 1 is uniform attention
    limits = (0.0, float(np.quantile(panels, BRIGHTEST_QUANTILE)) or 1.0)
    masks = None if mass is None else mask_by_mass(np.stack([mean, *maps]), mass)
    plot_photo(grid[0], photo, photo.shape)
    plot_outline(grid[0], box)
    for number, axes in enumerate(grid[1 : len(names)]):
        if masks is None:
            plot_map_over_photo(axes, photo, box, panels[number], limits)
            plot_patch_outlines(axes, box, find_strongest(panels[number]))
        else:
            plot_map_over_photo(axes, photo, box, enlarge(masks[number]), (0.0, 1.0))
            plot_patch_outlines(axes, box, masks[number])
        if patch is not None:
            plot_outline(axes, locate_patch_in_photo(box, mean.shape, patch))
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(name, fontsize=LABEL_POINTS)
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    if masks is None:
        shrink = min(0.85, 6 / figure.get_figheight())
        plot_scale(figure, grid, limits, "attention (1 = average)", shrink=shrink, open_end=limits[1] < panels.max())
    line = sanitize_label(heading, int(9 * FIGURE_WIDTH))
    figure.suptitle(line, fontsize=fit_font_size(line, FIGURE_WIDTH), x=0.01, ha="left", parse_math=False)
    return figure


def enlarge(masks: NDArray[np.bool_]) -> NDArray[np.float32]:
    return masks.astype(np.float32).repeat(MASK_SCALE, -2).repeat(MASK_SCALE, -1)
