"""Statistics of tokens by layer: norms, outliers (Darcet 2023), similarity of two tokens and of layers (CKA).

S states (0 after the embedding, then after each block), B images, N = E + n tokens, E prefix tokens, n = h·w patches,
D width. CKA is linear centered kernel alignment (Kornblith 2019) with the unbiased estimate of HSIC (Song 2012,
Nguyen 2021): with fewer images than dimensions, the biased estimate is always near 1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import BLUE, FIGURE_WIDTH, GRAY, NOTE_POINTS, PALETTE, SEQUENTIAL_MAP
from vitrail.base.text import format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATES_LABEL = "after the embedding (0) and each block"
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def token_norms(tokens: NDArray[Any]) -> NDArray[Any]:
    """Norm of each token: (…, N, D) → (…, N)."""
    return np.linalg.norm(tokens.astype(np.result_type(tokens.dtype, np.float32), copy=False), axis=-1)


def find_norm_outliers(norms: NDArray[Any], deviations: float = 4.0, times: float = 2.0) -> NDArray[np.bool_]:
    """Mask of the patches with an outlier norm, as in models that lack registers: (…, n) → (…, n).

    An outlier exceeds the image's median by 4 robust standard deviations (1.4826 × the median absolute deviation) and
    is at least twice the median, so that norms that hardly differ have no outliers.
    """
    median = np.median(norms, axis=-1, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(norms - median), axis=-1, keepdims=True)
    return (norms > median + deviations * deviation) & (norms > times * median)


def compute_token_cosines(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Cosine similarity, 0 for a token of zeros: (…, D), (…, D) → (…)."""
    a, b = (each.astype(np.result_type(each.dtype, np.float32), copy=False) for each in (a, b))
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return ((a * b).sum(-1) / np.where(norms > 0, norms, 1)).clip(-1, 1)


def draw_token_norms(norms: NDArray[Any], names: Sequence[str], grid: tuple[int, int]) -> CaptionedFigure:
    """Plot quantiles of the patches' norms and prefix tokens by depth, and the last norms by position: (S, B, N).

    Norms are NaN where a prefix token has not joined yet.
    """
    prefix = len(names)
    prefix_norms, patches = norms[..., :prefix].mean(1), norms[..., prefix:]  # (S, E), (S, B, n)
    outliers = find_norm_outliers(patches)
    share = outliers.mean((1, 2))
    levels = np.quantile(patches, QUANTILES, axis=(1, 2))  # (7, S)
    states, images = norms.shape[:2]
    by_position = patches[-1].mean(0).reshape(grid)

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, 4.3)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        lowest, low, lower, middle, upper, high, highest = levels
        depth = np.arange(states)
        left.fill_between(depth, lowest, highest, color=BLUE, alpha=0.12, linewidth=0, label="all patches")
        left.fill_between(depth, low, high, color=BLUE, alpha=0.22, linewidth=0, label="90% of patches")
        left.fill_between(depth, lower, upper, color=BLUE, alpha=0.4, linewidth=0, label="50% of patches")
        left.plot(depth, middle, color=BLUE, marker="o", markersize=3.5, label="median")
        for number, (line, name) in enumerate(zip(prefix_norms.T, names, strict=True)):
            color = PALETTE[1 + number % (len(PALETTE) - 1)]
            left.plot(depth, line, color=color, marker="s", markersize=3.5, label=f"{name} token")
        style_axes(left, f"length of the tokens, {format_count(images, 'image')}")
        left.set(xlabel=STATES_LABEL, ylabel="token norm")
        plotted = np.concatenate([levels.ravel(), prefix_norms.ravel()])
        if np.nanmin(plotted) > 0 and np.nanmax(plotted) > 20 * np.nanmin(plotted):
            left.set_yscale("log")
        else:
            left.set_ylim(bottom=0)
        left.locator_params(axis="x", integer=True, min_n_ticks=1)
        left.grid(alpha=0.25, linewidth=0.6)
        image = right.imshow(by_position, cmap=SEQUENTIAL_MAP, interpolation="nearest")
        style_axes(right, "patches by position")
        right.set(xlabel="patch column", ylabel="patch row")
        right.locator_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=right, label="mean norm after the last block", shrink=0.8)
        figure.legend(loc="outside lower left", ncols=6, frameon=False, fontsize=NOTE_POINTS)
        return figure

    caption = (
        f"Token norms {STATES_LABEL}, over {format_count(images, 'image')}. Left: median and quantiles of the"
        f" patches{' and the mean of each prefix token' if prefix else ''}. Right: mean norm of the patches by position"
        f" after the last block. {describe_outliers(share)}"
    )
    return CaptionedFigure(
        name="token_norms",
        title="How long the tokens are, by layer",
        caption=caption,
        arrays={"norms": norms, "outliers": outliers},
        draw=draw,
    )


def describe_outliers(share: NDArray[Any]) -> str:
    """Sentence on the state with the most outliers."""
    if not share.any():
        return "No patch has an outlier norm."
    state = int(share.argmax())
    return f"Outlier norms are most frequent in state {state}: {share[state]:.2%} of the patches."


def draw_class_distillation_similarity(cosines: NDArray[Any]) -> CaptionedFigure:
    """Plot the cosine similarity of class and distillation token by depth: (S,)."""

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, 3.6)
        axes = figure.subplots()
        axes.plot(np.arange(len(cosines)), cosines, color=BLUE, marker="o", markersize=4)
        style_axes(axes, "similarity of class and distillation tokens")
        axes.set(xlabel=STATES_LABEL, ylabel="cosine similarity", ylim=(min(0.0, float(cosines.min()) - 0.05), 1.04))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.25, linewidth=0.6)
        return figure

    return CaptionedFigure(
        name="token_similarity",
        title="How similar the class and distillation tokens are",
        caption=f"Their cosine similarity {STATES_LABEL}: {cosines[0]:.2f} at the start, {cosines[-1]:.2f} at the end.",
        arrays={"cosines": cosines},
        draw=draw,
    )


MIN_CKA_IMAGES = 4  # the unbiased estimate divides by B − 3


def centered_kernel(features: NDArray[Any]) -> NDArray[Any]:
    """U-centered Gram matrix: zero diagonal, rows that sum to 0 (Székely 2014): (B, D) → (B, B).

    The inner product of two such matrices is B·(B − 3) times Song's unbiased estimate of HSIC.
    """
    features = features - features[0]  # exact: features equal for all images become 0
    features = features - features.mean(0)
    images = len(features)
    kernel = features @ features.T
    np.fill_diagonal(kernel, 0)
    sums = kernel.sum(0)
    kernel = kernel - (sums + sums[:, None]) / (images - 2) + sums.sum() / ((images - 1) * (images - 2))
    np.fill_diagonal(kernel, 0)
    return kernel


def linear_cka(features: Sequence[NDArray[Any]] | NDArray[Any]) -> NDArray[Any]:
    """Unbiased linear CKA between all states, each (B, D), where D may differ: → (S, S).

    1 if features differ by a rotation and a scale, about 0 (possibly negative) if they are independent, NaN if they are
    equal for all images, as for a class token after the embedding.
    """
    shapes = [each.shape for each in features]
    if not shapes or {len(shape) for shape in shapes} != {2} or min(shape[0] for shape in shapes) < MIN_CKA_IMAGES:
        given = (len(shapes), *shapes[0]) if shapes else ()
        raise ConfigError(
            f"features have shape {given}; expected (states, images, width) with {MIN_CKA_IMAGES} images or more"
        )
    kernels = np.stack([centered_kernel(each.astype(np.float64)).ravel() for each in features])  # (S, B·B)
    products = kernels @ kernels.T
    lengths = np.sqrt(products.diagonal())
    scale = np.where(lengths > 0, lengths, np.nan)
    return (products / scale / scale[:, None]).clip(-1, 1)


def draw_cka(matrix: NDArray[Any]) -> CaptionedFigure:
    """Heat map of the CKA between all states: (S, S)."""
    undefined = [str(state) for state in range(len(matrix)) if np.isnan(matrix[state, state])]

    def draw() -> "Figure":
        figure = new_figure(FIGURE_WIDTH, 4.6, "compressed")
        axes = figure.subplots()
        axes.set_facecolor(GRAY)  # shows through NaN
        lowest = min(0.0, float(np.nanmin([*matrix.ravel(), 0.0])))
        image = axes.imshow(matrix, cmap=SEQUENTIAL_MAP, vmin=lowest, vmax=1, origin="lower", interpolation="nearest")
        style_axes(axes, "how similar the layers are")
        axes.set(xlabel=STATES_LABEL, ylabel=STATES_LABEL)
        axes.locator_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=axes, label="linear CKA", shrink=0.9)
        return figure

    caption = (
        f"Linear centered kernel alignment (unbiased) between the tokens {STATES_LABEL}."
        " A value of 1 means that two layers represent the images in the same way."
        f"{describe_least_similar_adjacent_states(matrix)}"
    )
    if undefined:
        caption += f" Gray: undefined, since state {', '.join(undefined)} is the same for all images."
    return CaptionedFigure(
        name="alignment", title="How similar the layers are", caption=caption, arrays={"alignment": matrix}, draw=draw
    )


def describe_least_similar_adjacent_states(matrix: NDArray[Any]) -> str:
    """Sentence on the two adjacent states that differ most."""
    steps = matrix.diagonal(1)
    if not len(steps) or np.isnan(steps).all():
        return ""
    step = int(np.nanargmin(steps))
    return f" The largest change is from state {step} to {step + 1} (CKA {steps[step]:.2f})."
