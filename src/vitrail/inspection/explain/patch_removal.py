"""Check a map by occlusion: remove the most or the least attended patches and measure the class probability.

B images, C channels, H×W pixels, N = E + n tokens: E prefix tokens and n = h·w patches, D width, K removed shares.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import BLUE, FIGURE_WIDTH, GRAY, RED
from vitrail.base.text import format_count
from vitrail.inspection.attention.capture import force_eager, list_blocks
from vitrail.models.base.contract import ImageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sort_patches_by_attention(attended: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of the patches from least to most attended, ties in row-major order: (h, w) → (h·w,)."""
    if attended.ndim != 2 or not np.isfinite(attended).all():
        raise ConfigError(
            f"the map has shape {attended.shape} or contains NaN; expected a finite number for each of h×w patches"
        )
    return np.argsort(attended, axis=None, kind="stable")


def select_patches_to_remove(attended: NDArray[Any], share: float, most: bool) -> NDArray[np.bool_]:
    """Mask of the most (or least) attended share of the patches, rounded; at least one patch stays: (h, w)."""
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of removed patches is {share}; expected 0 to 1")
    order = sort_patches_by_attention(attended)
    count = min(int(share * order.size + 0.5), order.size - 1)
    mask = np.zeros(attended.size, dtype=np.bool_)
    mask[order[::-1][:count] if most else order[:count]] = True
    return mask.reshape(attended.shape)


def gray_out_patches(pixels: NDArray[Any], gone: NDArray[np.bool_]) -> NDArray[Any]:
    """Set patches (h, w) of a normalized image (C, H, W) to 0, the mean color; they are about equally large."""
    (height, width), (rows, columns) = pixels.shape[-2:], gone.shape
    if pixels.ndim != 3 or height < rows or width < columns:
        shape = "×".join(map(str, pixels.shape))
        raise ConfigError(f"an image of {shape} does not divide into {rows}×{columns} patches; expected C×H×W pixels")
    by_row, by_column = np.arange(height) * rows // height, np.arange(width) * columns // width
    return np.where(gone[by_row[:, None], by_column], pixels.dtype.type(0), pixels)


def can_drop_tokens(model: ImageModel) -> bool:
    """Whether tokens carry their positions, so that some can be dropped; otherwise layers need the complete grid."""
    return not model.no_dropping_reason


@torch.no_grad()
def predict_without_patches(model: ImageModel, pixels: Tensor, gone: NDArray[np.bool_]) -> Tensor:
    """Logits (B, classes) of images (B, C, H, W) without patches (B, h, w), equally many per image."""
    if np.ptp(gone.sum((1, 2))):
        raise ConfigError(
            f"{gone.sum((1, 2)).tolist()} patches are to be removed; expected the same number for each image"
        )
    if not can_drop_tokens(model):
        grayed = np.stack([gray_out_patches(*each) for each in zip(pixels.float().cpu().numpy(), gone, strict=True)])
        return model(torch.from_numpy(grayed).to(pixels.device, pixels.dtype))
    kept = torch.from_numpy(~gone).flatten(1).nonzero()[:, 1].view(len(pixels), -1)  # (B, kept patches)

    def drop_tokens(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens: Tensor = given[0]  # (B, N, D)
        prefix = tokens.shape[1] - gone[0].size
        index = prefix + kept[..., None].to(tokens.device).expand(-1, -1, tokens.shape[2])
        return torch.cat([tokens[:, :prefix], tokens.gather(1, index)], dim=1), *given[1:]

    with list_blocks(model)[0].register_forward_pre_hook(drop_tokens), force_eager(model):
        return model(pixels)


@torch.no_grad()
def probabilities_without_patches(
    model: ImageModel, pixels: Tensor, attended: NDArray[Any], classes: Tensor, shares: Sequence[float], *, most: bool
) -> NDArray[Any]:
    """Probabilities of classes (B,) with shares of the most or least attended (B, h, w) patches removed: (B, K)."""
    probabilities = list[NDArray[Any]]()
    for share in shares:
        logits = predict_without_patches(
            model, pixels, np.stack([select_patches_to_remove(each, share, most) for each in attended])
        )
        probabilities.append(logits.float().softmax(-1).gather(1, classes[:, None])[:, 0].cpu().numpy())
    return np.stack(probabilities, axis=1)


def draw_removal_curves(
    shares: NDArray[Any],
    most: NDArray[Any],
    least: NDArray[Any],
    chance: NDArray[Any],
    *,
    removal_method: str,
    map_method: str = "attention",
) -> CaptionedFigure:
    """Plot the class probability (B, K) by share (K,) of removed patches, for three orders of removal."""
    curves = {"least": least, "chance": chance, "most": most}
    images, largest = len(most), int(np.abs((least - most).mean(0)).argmax())
    styles = (
        ("least", "least attended first", BLUE, "o-"),
        ("chance", "random order", GRAY, "s--"),
        ("most", "most attended first", RED, "^-"),
    )

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, 4)
        axes = figure.subplots()
        for name, label, color, style in styles:
            mean = curves[name].mean(0)
            axes.plot(100 * shares, mean, style, color=color, label=label, markersize=5, linewidth=1.6)
            error = curves[name].std(0, ddof=1) / np.sqrt(images) if images > 1 else 0 * mean
            axes.fill_between(100 * shares, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
        axes.set(xlabel="patches removed (%)", ylabel="mean class probability", ylim=(0, None))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(title="order of removal", alignment="left", frameon=False)
        style_axes(axes, f"the prediction as patches are removed, {format_count(images, 'image')}")
        return figure

    return CaptionedFigure(
        name="occlusion",
        title="How the prediction changes as patches are removed",
        caption=(
            f"Probability of the predicted class while patches are {removal_method}, in the order of their {map_method}"
            " map. If the map is meaningful, "
            "removing the most attended patches lowers it sooner than removing the least attended ones. The gap is "
            f"largest at {shares[largest]:.0%} of the patches: {most.mean(0)[largest]:.1%} without the most attended, "
            f"{least.mean(0)[largest]:.1%} without the least attended. "
            f"Mean over {format_count(images, 'image')}{'; bands show its standard error' * (images > 1)}."
        ),
        arrays={"shares": shares, **curves},
        draw=draw,
    )
