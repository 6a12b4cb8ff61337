"""Figures of DINO and EsViT: how often each prototype is used, and what the class token attends to."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import BLUE, FIGURE_WIDTH, LABEL_POINTS, SEQUENTIAL_MAP
from vitrail.layers.attention import SelfAttention
from vitrail.models.base.contract import ImageModel
from vitrail.tasks.pretraining.parts.image_rows import to_rgb

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_usage_figure(usage: Tensor) -> CaptionedFigure:
    """`usage` (K,) has the number of crops whose most probable prototype it is."""
    counts = np.sort(usage.cpu().numpy().astype(np.int64))[::-1]
    used, total = int((counts > 0).sum()), int(counts.sum())
    return CaptionedFigure(
        name="prototypes",
        title="Prototypes in use",
        caption=f"Number of global crops of validation images, {total} in all, whose most probable prototype each one "
        f"is, in falling order. {used} of {len(counts)} prototypes are in use.",
        arrays={"counts": counts},
        draw=lambda: draw_usage(counts),
    )


def draw_usage(counts: NDArray[np.int64]) -> "Figure":
    figure = new_figure(FIGURE_WIDTH, 3.2)
    axes = figure.subplots()
    shown = counts[: max(int((counts > 0).sum()), 1)]
    axes.fill_between(np.arange(1, len(shown) + 1), shown, step="mid", color=BLUE)
    axes.set_xlabel("prototypes, most used first")
    axes.set_ylabel("crops")
    style_axes(axes, f"{int((counts > 0).sum())} of {len(counts)} prototypes are in use")
    return figure


@torch.no_grad()
def compute_class_attention(model: ImageModel, images: Tensor) -> Tensor | None:
    """Attention of the class token to the patches in the last block, per head: (B, H, h, w).

    None if the model has no class token there, or another kind of attention.
    """
    attention = model.get_submodule(model.levels[-1].blocks[-1] + ".attn") if has_class_attention(model) else None
    if not isinstance(attention, SelfAttention):
        return None
    captured = list[Tensor]()

    def capture(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        assert isinstance(module, SelfAttention)
        grid = given[1] if len(given) > 1 else named.get("grid")
        captured.append(module.weights(given[0], grid)[:, :, 0, -model.grid[0] * model.grid[1] :])

    with attention.register_forward_pre_hook(capture, with_kwargs=True):
        model.tokens(images)
    return captured[0].unflatten(-1, model.grid)


def has_class_attention(model: ImageModel) -> bool:
    if model.prefix_tokens[:1] != ("class",) or model.no_maps_reason:
        return False
    return f"{model.levels[-1].blocks[-1]}.attn" in dict(model.named_modules())


def make_attention_figure(images: NDArray[np.uint8], maps: NDArray[np.float32]) -> CaptionedFigure:
    """Of images (B, H, W, C) and the maps of each head (B, heads, h, w)."""
    return CaptionedFigure(
        name="class_attention",
        title="What the class token attends to",
        caption=f"Images, and the attention of the class token to the patches in the last block of the "
        f"teacher, for each of {maps.shape[1]} heads, from 0 (dark) to the largest value of the head.",
        arrays={"images": images, "attention": maps},
        draw=lambda: draw_attention(images, maps),
    )


def draw_attention(images: NDArray[np.uint8], maps: NDArray[np.float32]) -> "Figure":
    columns, pixels = 1 + maps.shape[1], to_rgb(images / 255)
    side = FIGURE_WIDTH / max(columns, 4)
    figure = new_figure(FIGURE_WIDTH, side * len(images) * images.shape[1] / images.shape[2] + 0.4)
    for row, line in enumerate(figure.subplots(len(images), columns, squeeze=False)):
        line[0].imshow(pixels[row])
        for head, axes in enumerate(line[1:]):
            axes.imshow(maps[row, head], cmap=SEQUENTIAL_MAP, vmin=0)
        for column, axes in enumerate(line):
            axes.axis("off")
            if row == 0:
                axes.set_title("image" if column == 0 else f"head {column}", fontsize=LABEL_POINTS)
    return figure
