"""Figures of pre-training: reconstructions of masked images, how often prototypes are used, and class attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import BLUE, FIGURE_WIDTH, LABEL_POINTS, SEQUENTIAL_MAP, TITLE_POINTS
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.layers.attention import SelfAttention
from vitrail.models.base.contract import ImageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASK_GRAY = 0.5  # color of hidden pixels
PANEL_SIDE = 1.0  # inches, for 8 images or fewer


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
    columns, pixels = 1 + maps.shape[1], expand_to_rgb(images / 255)
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


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Images, which of their pixels were hidden, and what was predicted; visible pixels are those of the image.

    Pixels are from 0 to 1, in float32 (B, H, W, C).
    """

    images: NDArray[np.float32]
    hidden: NDArray[np.bool_]  # (B, H, W)
    predicted: NDArray[np.float32]

    @property
    def masked(self) -> NDArray[np.float32]:
        return np.where(self.hidden[..., None], np.float32(MASK_GRAY), self.images)

    @property
    def errors(self) -> NDArray[np.float32]:
        """The absolute error, mean of the channels: (B, H, W)."""
        return np.abs(self.predicted - self.images).mean(-1)

    def as_arrays(self) -> dict[str, NDArray[np.float32]]:
        return {"images": self.images, "masked": self.masked, "predicted": self.predicted, "errors": self.errors}


def make_reconstruction(
    images: Tensor, predicted: Tensor, hidden: Tensor, preprocessing: Preprocessing
) -> Reconstruction:
    """From model input (B, C, H, W), the predicted one, and the hidden pixels, bool (B, H, W)."""
    originals, places = to_pixels(images, preprocessing), hidden.cpu().numpy()
    shown = np.where(places[..., None], to_pixels(predicted, preprocessing), originals)
    return Reconstruction(images=originals, hidden=places, predicted=shown)


def make_reconstruction_figure(found: Reconstruction, caption: str) -> CaptionedFigure:
    """The images, what the model received, the predictions, and the errors."""
    arrays = found.as_arrays()
    return plot_image_rows(
        name="reconstructions",
        title="Reconstructions of masked images",
        caption=caption,
        rows=dict(zip(("image", "visible", "prediction", "error"), arrays.values(), strict=True)),
        arrays=arrays,
    )


def plot_image_rows(
    *,
    name: str,
    title: str,
    caption: str,
    rows: Mapping[str, NDArray[Any]],
    arrays: Mapping[str, NDArray[Any]],
) -> CaptionedFigure:
    """A figure with a row of N images for each label.

    Images are (N, H, W, C) with pixels from 0 to 1, or (N, H, W) for values that are shown as colors from black, 0, to
    the largest. `arrays` are saved with the figure.
    """
    return CaptionedFigure(
        name=name, title=title, caption=caption, arrays=dict(arrays), draw=lambda: draw_image_rows(title, rows)
    )


def draw_image_rows(title: str, rows: Mapping[str, NDArray[Any]]) -> "Figure":
    count = len(next(iter(rows.values())))
    figure = new_figure(FIGURE_WIDTH, len(rows) * PANEL_SIDE * min(1.0, 8 / count) * 1.15 + 0.3)
    for (label, images), axes_row in zip(rows.items(), figure.subplots(len(rows), count, squeeze=False), strict=True):
        largest = max(float(images.max()), 1e-6)  # ignored for RGB
        for image, axes in zip(expand_to_rgb(images) if images.ndim == 4 else images, axes_row, strict=True):
            axes.imshow(image, cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        axes_row[0].set_ylabel(label, fontsize=LABEL_POINTS)
    figure.suptitle(title, fontsize=TITLE_POINTS, x=0.02, ha="left")
    return figure


def expand_to_rgb(images: NDArray[Any]) -> NDArray[Any]:
    """Grayscale, the mean of the channels, for other numbers of channels than 3: (N, H, W, C) → (N, H, W, 3)."""
    shown = images if images.shape[-1] == 3 else images.mean(-1, keepdims=True)
    return np.broadcast_to(shown.clip(0, 1), (*images.shape[:3], 3))


def to_pixels(inputs: Tensor, preprocessing: Preprocessing) -> NDArray[np.float32]:
    """Model input as pixels from 0 to 1: (N, C, H, W) → (N, H, W, C)."""
    mean, std = (np.array(each, np.float32) for each in (preprocessing.mean, preprocessing.std))
    return (inputs.detach().float().cpu().permute(0, 2, 3, 1).numpy() * std + mean).clip(0, 1)
