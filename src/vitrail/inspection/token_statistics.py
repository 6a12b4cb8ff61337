"""Tokens from layer to layer: how long they are, which stand out (Darcet 2023), how alike two of them are.

S states (0 after the embedding, then after each block), B images, N = E + n tokens, E prefix tokens, n = h·w patches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError
from vitrail.figures import BLUE, COLOUR_MAP, COLOURS, CaptionedFigure, new_figure, pluralize, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATES_LABEL = "after the embedding (0) and each block"
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def token_norms(tokens: NDArray[Any]) -> NDArray[Any]:
    """Length of each token: (…, N, D) → (…, N)."""
    return np.linalg.norm(tokens.astype(np.result_type(tokens.dtype, np.float32), copy=False), axis=-1)


def find_norm_outliers(norms: NDArray[Any], deviations: float = 4.0, times: float = 2.0) -> NDArray[np.bool_]:
    """Which patches of an image are far longer than its others, as where it needs registers: (…, n) → (…, n).

    Longer than the median by 4 robust deviations (1.4826 × the median of the distances from the median, which for a
    normal distribution is its deviation), and twice the median at least: norms that hardly differ have no outliers.
    """
    median = np.median(norms, axis=-1, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(norms - median), axis=-1, keepdims=True)
    return (norms > median + deviations * deviation) & (norms > times * median)


def token_similarity(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Cosine, 0 with a token of zeros: (…, D), (…, D) → (…)."""
    a, b = (each.astype(np.result_type(each.dtype, np.float32), copy=False) for each in (a, b))
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return ((a * b).sum(-1) / np.where(lengths > 0, lengths, 1)).clip(-1, 1)


def plot_token_norms(norms: NDArray[Any], names: Sequence[str], grid: tuple[int, int]) -> CaptionedFigure:
    """Quantiles of the patches' norms by depth, each named prefix token a line, the last norms by place: (S, B, N).

    NaN where a prefix token is not there yet.
    """
    prefix = len(names)
    if norms.ndim != 3 or not norms.size or norms.shape[-1] != prefix + grid[0] * grid[1]:
        raise ConfigError(
            f"norms of the shape {norms.shape}; expected (states, images, tokens) with"
            f" {prefix} + {grid[0]}·{grid[1]} = {prefix + grid[0] * grid[1]} tokens"
        )
    first, patches = norms[..., :prefix].mean(1), norms[..., prefix:]  # (S, E), (S, B, n)
    far = find_norm_outliers(patches)
    share = far.mean((1, 2))
    levels = np.quantile(patches, QUANTILES, axis=(1, 2))  # (7, S)
    states, images = norms.shape[:2]
    places = patches[-1].mean(0).reshape(grid)

    def draw() -> "Figure":
        figure = new_figure(10.6, 4.7)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        least, low, lower, middle, upper, high, most = levels
        depth = np.arange(states)
        left.fill_between(depth, least, most, color=BLUE, alpha=0.12, linewidth=0, label="all patches")
        left.fill_between(depth, low, high, color=BLUE, alpha=0.22, linewidth=0, label="90 % of them")
        left.fill_between(depth, lower, upper, color=BLUE, alpha=0.4, linewidth=0, label="50 %")
        left.plot(depth, middle, color=BLUE, marker="o", markersize=3.5, label="median")
        for number, (line, name) in enumerate(zip(first.T, names, strict=True)):
            colour = COLOURS[1 + number % (len(COLOURS) - 1)]
            left.plot(depth, line, color=colour, marker="s", markersize=3.5, label=f"{name} token")
        style_axes(left, f"length of the tokens, {pluralize(images, 'image')}")
        left.set(xlabel=STATES_LABEL, ylabel="norm of a token")
        shown = np.concatenate([levels.ravel(), first.ravel()])
        if np.nanmin(shown) > 0 and np.nanmax(shown) > 20 * np.nanmin(shown):
            left.set_yscale("log")
        else:
            left.set_ylim(bottom=0)
        left.locator_params(axis="x", integer=True, min_n_ticks=1)
        left.grid(alpha=0.25, linewidth=0.6)
        image = right.imshow(places, cmap=COLOUR_MAP, interpolation="nearest")
        style_axes(right, "the patches by place")
        right.set(xlabel="column of the patch, from 0", ylabel="row of the patch, from 0")
        right.locator_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=right, label="mean norm after the last block", shrink=0.8)
        figure.legend(loc="outside lower left", ncols=6, frameon=False, fontsize=8)
        return figure

    caption = (
        f"Lengths of the tokens {STATES_LABEL}, over {pluralize(images, 'image')}: median and quantiles of the"
        f" patches{', the prefix tokens as lines of their own' if prefix else ''}; and the mean by place after the last"
        f" block. {describe_outliers(share)}"
    )
    return CaptionedFigure(
        name="token_norms",
        title="Norms of the tokens",
        caption=caption,
        arrays={"norms": norms, "outliers": far},
        draw=draw,
    )


def describe_outliers(share: NDArray[Any]) -> str:
    """In words: where most patches are outliers."""
    if not share.any():
        return "No patch is far longer than the others of its image."
    state = int(share.argmax())
    return f"At most {share[state]:.2%} of the patches are far longer than the others of their image (state {state})."


def plot_token_similarity(cosines: NDArray[Any]) -> CaptionedFigure:
    """How alike class and distillation token are, by depth: (S,)."""
    if cosines.ndim != 1 or not cosines.size:
        raise ConfigError(f"cosines of the shape {cosines.shape}; expected (states,), one at least")

    def draw() -> "Figure":
        figure = new_figure(6.4, 3.8)
        axes = figure.subplots()
        axes.plot(np.arange(len(cosines)), cosines, color=BLUE, marker="o", markersize=4)
        style_axes(axes, "class and distillation token")
        axes.set(xlabel=STATES_LABEL, ylabel="cosine", ylim=(min(0.0, float(cosines.min()) - 0.05), 1.04))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.25, linewidth=0.6)
        return figure

    return CaptionedFigure(
        name="token_similarity",
        title="Similarity of class and distillation token",
        caption=f"Cosine of class and distillation token {STATES_LABEL}: {cosines[0]:.2f} to {cosines[-1]:.2f}.",
        arrays={"cosines": cosines},
        draw=draw,
    )
