"""Does a map mean anything? Take away what it says was attended most, or least, and watch the answer.

B images, C channels, H×W pixels, h×w patches, K shares of the patches.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import ConfigError
from vitrail.figures import BLUE, GREY, RED, CaptionedFigure, new_figure, pluralize, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


def rank_patches(attended: "NDArray[Any]") -> "NDArray[np.intp]":
    """The patches, counted row by row, from the least to the most attended; equals in the order of reading: (h·w,)."""
    if attended.ndim != 2 or not np.isfinite(attended).all():
        raise ConfigError(
            f"a map of shape {attended.shape}, or with NaN in it; expected a number for each of h×w patches"
        )
    return np.argsort(attended, axis=None, kind="stable")


def select_patches_to_remove(attended: "NDArray[Any]", share: float, most: bool) -> "NDArray[np.bool_]":
    """Which patches the share attended most (or least) is, to the nearest whole patch; one stays always: (h, w)."""
    if not 0 <= share <= 1:
        raise ConfigError(f"a share of {share} of the patches; expected 0 to 1")
    order = rank_patches(attended)
    count = min(int(share * order.size + 0.5), order.size - 1)
    mask = np.zeros(attended.size, dtype=np.bool_)
    mask[order[::-1][:count] if most else order[:count]] = True
    return mask.reshape(attended.shape)


def grey_out_patches(pixels: "NDArray[Any]", gone: "NDArray[np.bool_]") -> "NDArray[Any]":
    """The image (C, H, W) with those patches (h, w) at 0, which after normalisation is the mean colour."""
    (height, width), (rows, columns) = pixels.shape[-2:], gone.shape
    if pixels.ndim != 3 or height % rows or width % columns:
        shape = "×".join(map(str, pixels.shape))
        raise ConfigError(f"an image of {shape} and a map of {rows}×{columns} patches; expected C×(rows·P)×(columns·Q)")
    patch = np.ones((height // rows, width // columns), dtype=np.bool_)
    return np.where(np.kron(gone, patch), pixels.dtype.type(0), pixels)


def plot_occlusion(
    shares: "NDArray[Any]",
    most: "NDArray[Any]",
    least: "NDArray[Any]",
    chance: "NDArray[Any]",
    *,
    removal_method: str,
) -> CaptionedFigure:
    """Shares (K,) of the patches removed in that way, and what probability (B, K) the class then has for each image."""
    curves = {"least": least, "chance": chance, "most": most}
    for name, values in curves.items():
        if values.ndim != 2 or not values.size or values.shape != (len(most), *shares.shape):
            raise ConfigError(
                f"{name} is {values.shape} for {shares.shape} shares and {len(most)} images; expected (images, shares)"
            )
    images, widest = len(most), int(np.abs((least - most).mean(0)).argmax())
    looks = (
        ("least", "the least attended first", BLUE, "o-"),
        ("chance", "in random order", GREY, "s--"),
        ("most", "the most attended first", RED, "^-"),
    )

    def draw() -> "Figure":
        figure = new_figure(6, 4)
        axes = figure.subplots()
        for name, label, colour, style in looks:
            mean = curves[name].mean(0)
            axes.plot(100 * shares, mean, style, color=colour, label=label, markersize=5, linewidth=1.6)
            error = curves[name].std(0, ddof=1) / np.sqrt(images) if images > 1 else 0 * mean
            axes.fill_between(100 * shares, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="patches removed (%)", ylabel="mean probability of the class", ylim=(0, None))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(title="patches removed", alignment="left", frameon=False)
        style_axes(axes, f"occlusion check, {pluralize(images, 'image')}")
        return figure

    return CaptionedFigure(
        name="occlusion",
        title="Occlusion check",
        caption=(
            f"How probable the class that the model answers stays while patches are {removal_method}. If the "
            "map means something, "
            "removing what is attended most hurts sooner than removing what is attended least: here the two are "
            f"farthest apart at {shares[widest]:.0%} of the patches, {most.mean(0)[widest]:.3f} without the most and "
            f"{least.mean(0)[widest]:.3f} without the least attended. "
            f"Mean over {pluralize(images, 'image')}{'; the bands are its standard error' * (images > 1)}."
        ),
        arrays={"shares": shares, **curves},
        draw=draw,
    )
