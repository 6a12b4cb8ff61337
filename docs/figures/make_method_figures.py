"""Draw one figure per method of docs/self-supervision.md: its input and its target on the photos of the package.

    python docs/figures/make_method_figures.py

Masks, views, colors and palettes are those that the tasks of vitrail/tasks/pretraining draw; nothing is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.base.figures import new_figure
from vitrail.base.style import BLUE, GRAY, RED
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.loader import BatchDataset, BatchIndices
from vitrail.data.rng import make_view_keys
from vitrail.recipes.task_settings import (
    ByolSettings,
    DinoSettings,
    MaeSettings,
    MppSettings,
    SimClrSettings,
    SimMimSettings,
)
from vitrail.tasks.pretraining.byol import Byol
from vitrail.tasks.pretraining.esvit import match_patches
from vitrail.tasks.pretraining.igpt import assign_points, make_palette
from vitrail.tasks.pretraining.mpp import classify_colors, draw_corruption, fill_cells
from vitrail.tasks.pretraining.parts.masked_prediction import draw_mask, join_patches, split_into_patches
from vitrail.tasks.pretraining.parts.self_distillation import make_crops
from vitrail.tasks.pretraining.simclr import SimClr
from vitrail.tasks.pretraining.simmim import hide_squares

FOLDER = Path(__file__).parent
SIZE, PATCH = 224, 16
GRID = (SIZE // PATCH, SIZE // PATCH)
PHOTOS = ("cat", "coffee", "rocket", "astronaut")
HOW = vitrail.Preprocessing(image_size=SIZE, crop=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
Pixels = NDArray[np.float32]  # (rows, columns, 3), from 0 to 1


@dataclass(frozen=True)
class Panel:
    image: Any
    title: str
    color: str = "black"  # of the title
    arrow: str = "→"  # before the panel


def load_photos() -> Tensor:
    """(B, 3, SIZE, SIZE), from 0 to 1."""
    transform = vitrail.open_model(make_backbone(), preprocessing=HOW).transform
    return torch.stack([transform(f"example:{name}") for name in PHOTOS])


def make_backbone() -> Any:
    return vitrail.create("ViT-Ti/16", image_size=SIZE, width=8, depth=1, heads=1, classes=0)


def to_pixels(image: Tensor) -> Pixels:
    """(3, rows, columns) → (rows, columns, 3)."""
    return image.permute(1, 2, 0).float().numpy().clip(0, 1)


def to_mask(patches: Tensor) -> Tensor:
    """Indices of patches → bool (n,)."""
    return torch.zeros(GRID[0] * GRID[1], dtype=torch.bool).index_fill(0, patches, value=True)


def paint_patches(image: Tensor, chosen: Tensor, color: Sequence[float]) -> Tensor:
    """The image with the chosen patches, bool (n,), in one color."""
    mask = chosen.reshape(GRID).repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)
    return torch.where(mask, torch.tensor(color)[:, None, None], image)


def draw_panels(panels: Sequence[Panel]) -> Figure:
    figure = new_figure(9.0, 2.35)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(panel.image, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(panel.title, fontsize=8.5, color=panel.color)
        if panel is not panels[0]:
            axes.text(-0.06, 0.5, panel.arrow, transform=axes.transAxes, ha="center", va="center", fontsize=13)
    return figure


def make_views(views: Any) -> dict[str, Tensor]:
    """The views of the photos: uint8 (count, B, 3, h, w) by name."""
    photos = [np.asarray(Image.fromarray((to_pixels(each) * 255).astype(np.uint8))) for each in load_photos()]
    data = ArrayDataset(np.stack(photos), np.zeros(len(photos), np.int64), ("photo",))
    dataset = BatchDataset(dataset=data, augmentation=Augmentation(), preprocessing=HOW, seed=3, views=views)
    chosen = np.arange(len(photos))
    return dict(dataset.__getitems__(BatchIndices(0, chosen, np.zeros_like(chosen))).tensors)


def draw_mae(photo: Tensor, keys: NDArray[np.uint64]) -> Figure:
    hidden = draw_mask(keys, GRID[0] * GRID[1], round(MaeSettings().mask_ratio * GRID[0] * GRID[1]))[0]
    patches = split_into_patches(photo[None], (PATCH, PATCH))[:, ~hidden]
    kept = join_patches(patches, (PATCH, PATCH), (7, 7))[0]
    return draw_panels(
        [
            Panel(to_pixels(photo), "image: 196 patches"),
            Panel(to_pixels(paint_patches(photo, hidden, (0.85, 0.85, 0.85))), "75 % are dropped"),
            Panel(to_pixels(kept), "encoder: 49 visible patches"),
            Panel(to_pixels(paint_patches(photo, ~hidden, (1.0, 1.0, 1.0))), "decoder predicts these pixels", RED),
        ]
    )


def draw_simmim(photo: Tensor, keys: NDArray[np.uint64]) -> Figure:
    hidden = to_mask(hide_squares(keys, (SIZE, SIZE), (PATCH, PATCH), SimMimSettings())[0])
    return draw_panels(
        [
            Panel(to_pixels(photo), "image"),
            Panel(to_pixels(paint_patches(photo, hidden, (0.55, 0.6, 0.75))), "squares of 32 pixels: mask token"),
            Panel(to_pixels(paint_patches(photo, ~hidden, (1.0, 1.0, 1.0))), "one linear layer predicts these", RED),
        ]
    )


def draw_mpp(photo: Tensor, keys: NDArray[np.uint64]) -> Figure:
    corruption = draw_corruption(keys, GRID[0] * GRID[1], MppSettings())
    corrupted = to_mask(corruption.corrupted[0])
    patches = split_into_patches(photo[None], (PATCH, PATCH))
    moved = join_patches(patches[:, corruption.sources[0]], (PATCH, PATCH), GRID)[0]
    panels = [
        Panel(to_pixels(photo), "image"),
        Panel(to_pixels(paint_patches(moved, corruption.masked[0], (0.55, 0.6, 0.75))), "half corrupted: 80/10/10%"),
    ]
    for cells, title in ((1, "target: 3-bit mean color"), (4, "or 4×4 of them")):
        classes = classify_colors(patches, (PATCH, PATCH), cells)
        colors = join_patches(fill_cells(classes, 3, (PATCH, PATCH), cells), (PATCH, PATCH), GRID)[0]
        panels.append(Panel(to_pixels(paint_patches(colors, ~corrupted, (1.0, 1.0, 1.0))), title, RED))
    return draw_panels(panels)


def draw_simclr() -> Figure:
    settings = SimClrSettings()
    views = make_views(SimClr(make_backbone(), settings).views)["views"].float() / 255  # (2, B, 3, h, w)
    rows = views.transpose(0, 1).flatten(0, 1)  # both views of an image next to each other
    figure = new_figure(9.0, 3.3)
    grid = figure.add_gridspec(2, 6, width_ratios=(1, 1, 1, 1, 0.3, 2.3))
    for column in range(len(PHOTOS)):
        for row in range(2):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(to_pixels(views[row, column]))
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_title(f"image {column + 1}, view {row + 1}", fontsize=7.5)
    axes = figure.add_subplot(grid[:, 5])
    names = [f"{image + 1}.{view + 1}" for image in range(len(PHOTOS)) for view in range(2)]
    table = np.ones((len(rows), len(rows), 3)) * 0.86
    for index in range(len(rows)):
        table[index, index] = 1.0
        table[index, index ^ 1] = (0.184, 0.427, 0.702)
    axes.imshow(table)
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_title("similarity: blue high, gray low", fontsize=8.5, color=RED)
    return figure


def draw_byol() -> Figure:
    views = make_views(Byol(make_backbone(), ByolSettings(projector_width=8, projection_width=8)).views)
    first, second = (views[name][0].float() / 255 for name in ("first", "second"))
    figure = new_figure(9.0, 3.6)
    axes_rows = figure.subplots(2, 4, width_ratios=(1, 1.3, 1.3, 1.3))
    texts = (
        (first[3], "view 1", "online network", "predictor", "prediction"),
        (second[3], "view 2", "teacher: moving average", "no gradient", "target"),
    )
    for axes_row, (view, title, *boxes) in zip(axes_rows, texts, strict=True):
        axes_row[0].imshow(to_pixels(view))
        axes_row[0].set_title(title, fontsize=8.5)
        for axes, text in zip(axes_row[1:], boxes, strict=True):
            color = RED if text in ("prediction", "target") else GRAY if text == "no gradient" else BLUE
            style = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": color}
            axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=9, color=color, bbox=style)
            axes.text(-0.02, 0.5, "→", ha="center", va="center", fontsize=13, transform=axes.transAxes)
        for axes in axes_row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    axes_rows[1, 3].annotate(
        "2 − 2·cosine",
        (0.5, 0.72),
        (0.5, 1.12),
        xycoords="axes fraction",
        ha="center",
        fontsize=8.5,
        color=RED,
    )
    return figure


def draw_dino() -> Figure:
    views = make_views(make_crops(DinoSettings(local_crops=4, local_size=96, global_size=SIZE)))
    panels = [Panel(to_pixels(load_photos()[0]), "image")]
    for number in (1, 2):
        crop = views[f"global_{number}"][0, 0].float() / 255
        panels.append(Panel(to_pixels(crop), f"global crop {number}", BLUE, "→" if number == 1 else ""))
    panels += [Panel(to_pixels(each[0].float() / 255), "local crop", GRAY, "") for each in views["local"][:3]]
    return draw_panels(panels)


def draw_esvit() -> Figure:
    """Patches of two crops, matched by their pixels as a stand-in for the features of a trained model."""
    settings = DinoSettings(local_crops=0, global_size=SIZE, jitter=0.0, gray=0.0, blur=0.0, solarize=0.0)
    views = make_views(make_crops(settings))
    crops = [views[f"global_{number}"][0, 3].float() / 255 for number in (1, 2)]
    patches = [F.unfold(F.avg_pool2d(each[None], 8), 4, stride=4).transpose(1, 2) for each in crops]  # 7×7 regions
    centered = [each - each.mean(1, keepdim=True) for each in patches]
    matches = match_patches([centered[0]], [centered[1]])[0][0][0]
    figure = new_figure(9.0, 2.9)
    left, right = figure.subplots(1, 2)
    for axes, crop, title in zip((left, right), crops, ("student's crop", "teacher's crop"), strict=True):
        axes.imshow(to_pixels(crop))
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=8.5)
    for patch in (1, 17, 24, 30, 36, 46):
        start, end = (((n % 7) * 32 + 16, (n // 7) * 32 + 16) for n in (patch, int(matches[patch])))
        line = ConnectionPatch(start, end, "data", "data", axesA=left, axesB=right, color=RED, linewidth=1.2)
        figure.add_artist(line)
        left.plot(*start, "o", color=RED, markersize=4)
        right.plot(*end, "o", color=RED, markersize=4)
    return figure


def draw_aim(photo: Tensor) -> Figure:
    seen, count = 90, GRID[0] * GRID[1]
    order = torch.arange(count)
    context = paint_patches(photo, order >= seen, (0.85, 0.85, 0.85))
    target = paint_patches(photo, order != seen, (0.93, 0.93, 0.93))
    return draw_panels(
        [
            Panel(to_pixels(photo), "image"),
            Panel(to_pixels(context), "patches before, row by row"),
            Panel(to_pixels(target), "predict the pixels of the next one", RED),
        ]
    )


def draw_igpt(photo: Tensor) -> Figure:
    small = F.interpolate(photo[None], 32, mode="bilinear", antialias=True)[0].permute(1, 2, 0).double().numpy()
    pixels = small.reshape(-1, 3)
    palette = make_palette(pixels, 64, seed=0)
    painted = palette[assign_points(pixels, palette)[0]].reshape(32, 32, 3)
    seen = painted.copy()
    seen.reshape(-1, 3)[500:] = 0.85
    return draw_panels(
        [
            Panel(small, "image, 32×32 pixels"),
            Panel(palette.reshape(8, 8, 3), "palette by k-means"),
            Panel(painted, "1,024 tokens"),
            Panel(seen.clip(0, 1), "predict the next color", RED),
        ]
    )


def save(figure: Figure, name: str) -> None:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    target = FOLDER / f"method-{name}.png"
    Image.open(buffer).convert("RGB").quantize(256).save(target, optimize=True)
    print(f"{target.name}: {target.stat().st_size / 1e3:.0f} KB")


def main() -> None:
    photos, keys = load_photos(), make_view_keys(0, 0, 0, 0)
    cat, coffee, rocket, astronaut = photos
    save(draw_mae(cat, keys), "mae")
    save(draw_simmim(coffee, keys), "simmim")
    save(draw_mpp(astronaut, keys), "mpp")
    save(draw_simclr(), "simclr")
    save(draw_byol(), "byol")
    save(draw_dino(), "dino")
    save(draw_esvit(), "esvit")
    save(draw_aim(rocket), "aim")
    save(draw_igpt(coffee), "igpt")


if __name__ == "__main__":
    main()
