"""Principal components of patch features as colors: parts that the model represents alike have the same color.

B images, n = h·w patches per image, D width. The components are those of all images together (Amir 2021; Oquab 2023).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, VitrailError
from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label
from vitrail.base.style import FIGURE_WIDTH, GRAY, LABEL_POINTS
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.inspection.attention.capture import force_eager
from vitrail.models.base.checks import check_count
from vitrail.models.base.contract import ImageModel, find_image_model
from vitrail.opening import GivenPreprocessing, Opened, open_torch_model
from vitrail.predict.predictor import Predictor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPONENTS = 3  # red, green and blue
MAX_FITTED_PATCHES = 4096  # evenly spaced; more change the components little
MAX_IMAGES = 64  # in one figure
COLOR_QUANTILES = (0.01, 0.99)  # of all patches: darkest and brightest, so that single patches do not set the scale
MAX_PAIRS_PER_ROW = 4  # an image and its colors


@dataclass(frozen=True, kw_only=True, eq=False)  # comparing arrays is ambiguous
class PrincipalComponents:
    """Directions of the largest variance, sorted by it. The largest entry of each direction is positive."""

    mean: NDArray[np.float64]  # (D,)
    directions: NDArray[np.float64]  # (3, D), of length 1
    variance_shares: NDArray[np.float64]  # (3,)

    def project(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """(…, D) → (…, 3)"""
        return (features - self.mean) @ self.directions.T


def fit_components(features: NDArray[Any], count: int = COMPONENTS) -> PrincipalComponents:
    """The first principal components of features (n, D), from evenly spaced ones if there are many."""
    if len(features) < count or features.shape[1] < count:
        raise ConfigError(
            f"{len(features)} patches of width {features.shape[1]} have no {count} principal components; expected at "
            f"least {count} patches: use larger images, more of them, or a model with smaller patches"
        )
    chosen = np.linspace(0, len(features) - 1, min(len(features), MAX_FITTED_PATCHES)).astype(int)
    used = torch.from_numpy(features[chosen].astype(np.float64))
    centered = used - used.mean(0)
    _, values, directions = torch.linalg.svd(centered, full_matrices=False)
    largest = directions.abs().argmax(-1, keepdim=True)
    directions = directions * directions.gather(1, largest).sign()  # a component is known up to its sign
    variances = values.square()
    return PrincipalComponents(
        mean=used.mean(0).numpy(),
        directions=directions[:count].numpy(),
        variance_shares=(variances[:count] / variances.sum().clamp(min=1e-30)).numpy(),
    )


def components_to_colors(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale each component to 0…255 between its quantiles over all patches: (n, 3)."""
    low, high = np.quantile(values, COLOR_QUANTILES, axis=0)
    span = np.where(high - low > 1e-12, high - low, 1)
    scaled = np.where(high - low > 1e-12, (values - low) / span, 0.5)  # a constant component is gray
    return np.rint(255 * scaled.clip(0, 1)).astype(np.uint8)


def find_foreground(first: NDArray[Any]) -> NDArray[np.bool_]:
    """Split patches by their first component (B, h, w) in two; the foreground is less frequent at the borders.

    The threshold is the mean of the two groups' means (Ridler 1978).
    """
    threshold = first.mean()
    for _ in range(100):
        above = first > threshold
        if above.all() or not above.any():
            break
        following = (first[above].mean() + first[~above].mean()) / 2
        if abs(following - threshold) < 1e-9 * max(1.0, abs(threshold)):
            break
        threshold = following
    above = first > threshold
    border = np.ones(first.shape[1:], bool)
    border[1:-1, 1:-1] = False
    return above if above[:, border].mean() <= above.mean() else ~above


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchColors:
    """Colors of the patches of several images, by shared components."""

    colors: NDArray[np.uint8]  # (B, h, w, 3)
    components: NDArray[np.float64]  # (B, h, w, 3)
    variance_shares: NDArray[np.float64]  # (3,)
    foreground: NDArray[np.bool_] | None = None  # (B, h, w); the background is black


def color_patches(features: NDArray[Any], *, foreground: bool = False) -> PatchColors:
    """Colors by the first three components of all patches: (B, h, w, D).

    With `foreground`, the first component separates foreground and background, and the colors are the components of
    the foreground alone.
    """
    grid, flat = features.shape[:3], features.reshape(-1, features.shape[-1])
    if not np.isfinite(flat).all():
        raise VitrailError(NOT_FINITE_MESSAGE)
    fitted, mask = fit_components(flat), None
    if foreground:
        mask = find_foreground(fitted.project(flat)[:, 0].reshape(grid))
        if mask.sum() < COMPONENTS:
            raise ConfigError(
                f"`foreground` leaves {mask.sum()} of {mask.size} patches; expected at least {COMPONENTS}: leave it out"
            )
        fitted = fit_components(flat[mask.ravel()])
    values = fitted.project(flat)
    colors = np.zeros((len(flat), COMPONENTS), np.uint8)
    chosen = slice(None) if mask is None else mask.ravel()
    colors[chosen] = components_to_colors(values[chosen])
    return PatchColors(
        colors=colors.reshape(*grid, COMPONENTS),
        components=values.reshape(*grid, COMPONENTS),
        variance_shares=fitted.variance_shares,
        foreground=mask,
    )


@torch.no_grad()
def compute_patch_features(model: ImageModel, pixels: Tensor) -> Tensor:
    """Features of the patches: tokens after the final norm without the prefix, or the last map: (B, h, w, D)."""
    with force_eager(model):
        if len(model.levels) == 1 and model.final_norm:
            h, w = model.check_images(pixels)
            return model.tokens(pixels)[:, -h * w :].unflatten(1, (h, w)).float()
        return model.feature_maps(pixels)[-1].permute(0, 2, 3, 1).float()


def draw_patch_pca(
    model: "str | Path | nn.Module | Opened | Predictor",
    images: Iterable[Any],
    *,
    names: Sequence[str] | None = None,
    foreground: bool = False,
    batch: int = 4,
    preprocessing: GivenPreprocessing = None,
) -> CaptionedFigure:
    """Color the patches of images by the first three principal components of their features, over all images.

    Works for every model with a grid of patches, with or without a head. `foreground` leaves out the background,
    found by the first component. At most 64 images are shown.

    >>> figure = vitrail.draw_patch_pca("cct_cifar10", ["example:cat", "example:rocket"])
    >>> figure.arrays["colors"].shape  # images, rows and columns of patches, RGB
    (2, 8, 8, 3)
    """
    if isinstance(images, str | bytes | Path) or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"images is one {type(images).__name__}; expected several in a list")
    opened = model.loaded if isinstance(model, Predictor) else model
    loaded = open_torch_model(opened, preprocessing=preprocessing)
    given = [*images]
    if not 0 < len(given) <= MAX_IMAGES:
        raise ConfigError(f"{len(given)} images; expected 1 to {MAX_IMAGES}, which share one figure")
    declared = find_image_model(loaded.module)
    if declared is None:
        raise ConfigError(
            f"{type(loaded.module).__name__} has no grid of patches; expected a model of vitrail's families, or a "
            "subclass of vitrail.models.base.contract.ImageModel"
        )
    check_count("batch", batch)
    batches = [given[start : start + batch] for start in range(0, len(given), batch)]
    parts = [compute_patch_features(declared, loaded.make_batch(each)).cpu().numpy() for each in batches]
    photos = np.stack([to_rgb_array(decode_for_model(each, loaded.preprocessing)) for each in given])
    shown = names or [str(each) if isinstance(each, str | Path) else "" for each in given]
    return draw_patch_colors(photos, color_patches(np.concatenate(parts), foreground=foreground), shown)


def to_rgb_array(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(rows, columns, 1 or 3) → (rows, columns, 3)"""
    return np.broadcast_to(image, (*image.shape[:2], 3)) if image.shape[-1] == 1 else image


def draw_patch_colors(
    photos: NDArray[np.uint8], found: PatchColors, names: Sequence[str] = (), name: str = "patch_pca"
) -> CaptionedFigure:
    """A figure of images (B, rows, columns, 3), each next to the colors of its patches."""
    count, h, w = found.colors.shape[:3]
    shares = ", ".join(f"{share:.0%}" for share in found.variance_shares)
    shared = "" if count == 1 else f" of {count} images together: equal colors mean similar features"
    background = "" if found.foreground is None else " The background, by the first component, is black."
    return CaptionedFigure(
        name=name,
        title="Patches colored by their features",
        caption=f"The first three principal components of the features of {h}×{w} patches{shared}. Red, green and blue "
        f"explain {shares} of the variance; each is scaled between its 1% and 99% quantiles.{background}",
        arrays={
            "colors": found.colors,
            "components": found.components.astype(np.float32),
            "variance_shares": found.variance_shares,
            "photos": photos,
            **({} if found.foreground is None else {"foreground": found.foreground}),
        },
        draw=lambda: draw_pairs(photos, found.colors, names),
    )


def draw_pairs(photos: NDArray[np.uint8], colors: NDArray[np.uint8], names: Sequence[str]) -> "Figure":
    """Each image next to its colors, in rows of equal panels; all in one axes, in inches."""
    from matplotlib.patches import Rectangle

    pairs = min(len(photos) if len(photos) < 4 else ceil(len(photos) / 2), MAX_PAIRS_PER_ROW)
    inner, outer = 0.06, 0.22  # inches between the two panels of a pair, and between pairs
    side = min((FIGURE_WIDTH - outer) / pairs - outer - inner, 2 * 2.6) / 2
    height = side * min(max(photos.shape[1] / photos.shape[2], 0.3), 3.0)
    rows, label = ceil(len(photos) / pairs), 0.24
    total = rows * (height + label + 0.14) + 0.1
    figure = new_figure(FIGURE_WIDTH, total)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    start = (FIGURE_WIDTH - pairs * (2 * side + inner) - (pairs - 1) * outer) / 2
    for number, (photo, color) in enumerate(zip(photos, colors, strict=True)):
        row, column = divmod(number, pairs)
        left, top = start + column * (2 * side + inner + outer), 0.1 + row * (height + label + 0.14) + label
        text = Path(names[number].removeprefix(EXAMPLE_PREFIX)).name if number < len(names) else ""
        axes.text(left, top - 0.07, sanitize_label(text, int(24 * side)), fontsize=LABEL_POINTS, parse_math=False)
        for panel, image in enumerate((photo, color)):
            x = left + panel * (side + inner)
            axes.imshow(image, extent=(x, x + side, top + height, top), interpolation="nearest", aspect="auto")
            axes.add_patch(Rectangle((x, top), side, height, fill=False, edgecolor=GRAY, linewidth=0.6))
    axes.set(xlim=(0, FIGURE_WIDTH), ylim=(total, 0))
    return figure
