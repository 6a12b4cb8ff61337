"""All figures of a model: filters and positions from its weights, attention and tokens over some images.

B images, L layers, S = L + 1 states of the tokens, H heads, N tokens, D width, K shares of removed patches.
"""

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, DataError, VitrailError, unknown_name_error
from vitrail.base.figures import CaptionedFigure
from vitrail.base.progress import Progress, track_progress
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.inspection.attention.attention_distance import (
    attention_distance,
    draw_attention_distance,
    reduced_attention_distance,
    uniform_attention_distance,
    window_attention_distance,
)
from vitrail.inspection.attention.capture import capture_attention, capture_tokens, why_several_grids
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.patch_removal import can_drop_tokens, draw_removal_curves, probabilities_without_patches
from vitrail.inspection.representation.patch_pca import color_patches, draw_patch_colors, to_rgb_array
from vitrail.inspection.representation.token_statistics import (
    MIN_CKA_IMAGES,
    compute_token_cosines,
    draw_cka,
    draw_class_distillation_similarity,
    draw_token_norms,
    linear_cka,
    token_norms,
)
from vitrail.inspection.representation.weight_patterns import (
    draw_filters,
    draw_position_similarity,
    find_first_filters,
    find_position_table,
    position_similarity,
    principal_filters,
)
from vitrail.models.base.checks import check_count
from vitrail.models.base.contract import ImageModel
from vitrail.models.parts.attention import ReducedGrid
from vitrail.models.parts.windows import Windows
from vitrail.opening import Opened
from vitrail.predict.predictor import Predictor

Arrays = list[NDArray[Any]]  # one per batch
OCCLUSION_SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # removed share of the patches

FIGURE_NAMES = (  # all figures that a model may have
    *("filters", "position_similarity", "attention_distance", "token_norms", "token_similarity", "alignment"),
    *("occlusion", "patch_pca"),
)
MAX_PCA_IMAGES = 8  # images in the figure of principal components


@dataclass(frozen=True)
class ModelFigures:
    """Figures of a model, each with its caption and arrays."""

    figures: tuple[CaptionedFigure, ...]
    images: int
    notes: tuple[str, ...] = ()  # figures that could not be drawn, and why
    skipped: tuple[str, ...] = ()  # images that could not be read, and why

    def __getitem__(self, name: str) -> CaptionedFigure:
        by_name = {each.name: each for each in self.figures}
        if name not in by_name:
            raise unknown_name_error("figure", name, by_name)
        return by_name[name]


def look(
    model: str | Path | nn.Module | Opened | Predictor | Explainer,
    images: Iterable[Any] = (),
    *,
    batch: int = 4,
    options: ExplainOptions | None = None,
    progress: Progress = None,
) -> ModelFigures:
    """Draw filters and positions and, over the images, attention distance, tokens, CKA, occlusion and patch features.

    Images are of any kind that `open_image` takes; only one batch is in memory at a time. The occlusion check uses the
    map that `options` select, by default that of `Explainer.default_method`.

    >>> figures = vitrail.look("vit_fashion")
    >>> [each.name for each in figures.figures]
    ['position_similarity', 'filters']
    """
    check_count("batch", batch)
    if isinstance(images, str | bytes) or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"images is one {type(images).__name__}; expected several in a list")
    explainer = model if isinstance(model, Explainer) else Explainer(model)
    options = explainer.resolve_options(options or ExplainOptions(method=explainer.default_method))
    figures, notes = draw_weight_figures(explainer.model)
    statistics, skipped, pending = ActivationStatistics(), list[str](), list[Tensor]()
    with track_progress(progress, len(images) if isinstance(images, Sized) else None, "images") as advance:
        for image in images:
            try:
                pending.append(explainer.loaded.make_batch([image]))
            except DataError as error:
                skipped.append(str(error))
            if len(pending) == batch:
                statistics.add_batch(explainer, torch.cat(pending), options)
                pending.clear()
            advance(1)
    if pending:
        statistics.add_batch(explainer, torch.cat(pending), options)
    if skipped and not statistics.images:
        raise DataError(f"none of the {len(skipped)} images can be read, for instance: {skipped[0]}")
    if statistics.images:
        more_figures, more_notes = draw_activation_figures(statistics)
        figures, notes = figures + more_figures, notes + more_notes
    else:
        notes.append("no images were given: attention distance, tokens, CKA, occlusion and patch features need some")
    return ModelFigures(tuple(figures), statistics.images, tuple(notes), tuple(skipped))


def draw_weight_figures(model: ImageModel) -> tuple[list[CaptionedFigure], list[str]]:
    """Figures of the weights, and notes on those that cannot be drawn."""
    figures, notes = list[CaptionedFigure](), list[str]()
    table = find_position_table(model)
    if table is None:
        notes.append("position similarity: this model does not add a position table to its tokens")
    else:
        figures.append(draw_position_similarity(position_similarity(table, model.levels[0].grid)))
    filters = find_first_filters(model)
    if filters is None or len(filters) < 2:
        notes.append("filters: this model has no convolution over the image")
    else:
        figures.append(draw_filters(*principal_filters(filters)))
    return figures, notes


@dataclass
class ActivationStatistics:
    """Statistics of all images so far, without maps and tokens, so that those of thousands fit in memory."""

    images: int = 0
    distances: Arrays = field(default_factory=Arrays)  # (B, L, H), NaN for heads that a layer does not have
    no_distances_reason: str = ""
    no_occlusion_reason: str = "this model has no head, so there is no class probability to measure"
    no_norms_reason: str = ""
    norms: Arrays = field(default_factory=Arrays)  # (B, S, N)
    means: list[Arrays] = field(default_factory=list[Arrays])  # of each state: (B, D)
    cosines: Arrays = field(default_factory=Arrays)  # (B, S)
    removal_method: str = ""  # how patches were removed
    map_method: str = ""  # of the maps that they were ordered by
    occlusion_curves: dict[str, Arrays] = field(default_factory=dict[str, Arrays])  # by order of removal: (B, K)
    grid: tuple[int, int] = (0, 0)  # of the last layer
    sampled: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list[tuple[NDArray[Any], NDArray[Any]]])
    sampling_step: int = 1  # every so many images are sampled: features of the patches (n, D) and the image (H, W, 3)
    token_names: tuple[str, ...] = ()  # of the prefix tokens
    image_size: tuple[int, int] = (0, 0)

    def add_batch(self, explainer: Explainer, pixels: Tensor, options: ExplainOptions) -> None:
        """Add the statistics of one batch: (B, C, H, W)."""
        model, self.image_size = explainer.model, (pixels.shape[2], pixels.shape[3])

        def distance(weights: Tensor, place: tuple[int, int] | Windows | ReducedGrid) -> NDArray[Any]:
            maps = weights.cpu().numpy()
            if isinstance(place, ReducedGrid):
                return reduced_attention_distance(maps, place, self.image_size)
            if isinstance(place, Windows):
                return window_attention_distance(maps, place, self.patch_size(place.grid))
            return attention_distance(maps, place, self.patch_size(place))

        no_shares_reason = [each.no_shares_reason for each in explainer.layers if each.no_shares_reason]
        self.no_distances_reason = explainer.no_maps_reason or next(iter(no_shares_reason), "")
        layers = [] if self.no_distances_reason else None
        with torch.no_grad(), capture_attention(model, layers, keep=distance) as maps, capture_tokens(model) as states:
            model.tokens(pixels)
        self.grid, self.token_names = maps.grids[max(maps.grids)], model.prefix_tokens
        if not self.no_distances_reason:
            heads = max(each.shape[1] for each in maps.maps)
            missing = [[(0, 0), (0, heads - each.shape[1])] for each in maps.maps]
            padded = [np.pad(*each, constant_values=np.nan) for each in zip(maps.maps, missing, strict=True)]
            self.distances.append(np.stack(padded, axis=1))
        tokens = [each.float().cpu().numpy() for each in states[:-1]]  # before the final norm, which equalizes norms
        if not np.isfinite(tokens[-1]).all():
            raise VitrailError(NOT_FINITE_MESSAGE)
        self.no_norms_reason = why_several_grids(model)
        if not self.no_norms_reason:
            count = max(each.shape[1] for each in tokens)
            late = [(0, 0), (count, 0)]  # a class token that joins later has no norm before
            norms = [np.pad(token_norms(each), late, constant_values=np.nan)[:, -count:] for each in tokens]
            self.norms.append(np.stack(norms, axis=1))
        self.means = self.means or [[] for _ in tokens]
        for state, each in zip(self.means, tokens, strict=True):
            state.append(each.mean(1))
        if "distill" in self.token_names:
            self.cosines.append(np.stack([compute_token_cosines(each[:, 0], each[:, 1]) for each in tokens], axis=1))
        if explainer.no_maps_reason:
            self.no_occlusion_reason = explainer.no_maps_reason
        elif explainer.loaded.classes:
            self.add_occlusion(explainer, pixels, options)
        for features, image in zip(states[-1], pixels, strict=True):
            self.add_sample(features[-self.grid[0] * self.grid[1] :], image, explainer.loaded.preprocessing)
            self.images += 1

    def add_sample(self, features: Tensor, image: Tensor, preprocessing: Preprocessing) -> None:
        """Keep evenly spaced images, at most MAX_PCA_IMAGES, however many there will be: (n, D), (C, H, W)."""
        if self.images % self.sampling_step:
            return
        if len(self.sampled) == MAX_PCA_IMAGES:
            self.sampled, self.sampling_step = self.sampled[::2], 2 * self.sampling_step
            if self.images % self.sampling_step:
                return
        self.sampled.append((features.float().cpu().numpy(), undo_normalization(image, preprocessing)))

    def patch_size(self, grid: tuple[int, int]) -> tuple[float, float]:
        """Height and width of a patch in pixels."""
        return self.image_size[0] / grid[0], self.image_size[1] / grid[1]

    def add_occlusion(self, explainer: Explainer, pixels: Tensor, options: ExplainOptions) -> None:
        logits, maps = explainer.compute_maps(pixels, options)
        self.map_method = options.method
        self.removal_method = (
            "removed from the sequence" if can_drop_tokens(explainer.model) else "replaced by the mean color"
        )
        attended, classes = maps[:, -1, -1], logits.argmax(-1)
        grid = attended.shape[1:]
        random = np.stack([np.random.default_rng(self.images + n).random(grid) for n in range(len(pixels))])
        unchanged = logits.float().softmax(-1).gather(1, classes[:, None]).cpu().numpy()  # a share of 0
        for name, by, most in (("most", attended, True), ("least", attended, False), ("chance", random, True)):
            found = probabilities_without_patches(explainer.model, pixels, by, classes, OCCLUSION_SHARES[1:], most=most)
            self.occlusion_curves.setdefault(name, []).append(np.concatenate([unchanged, found], axis=1))


def mean_of_known(values: NDArray[Any]) -> NDArray[Any]:
    """The mean without NaN; NaN where nothing else is: (B, …) → (…)."""
    counts = (~np.isnan(values)).sum(0)
    return np.divide(np.nansum(values, 0), counts, out=np.full(counts.shape, np.nan, values.dtype), where=counts > 0)


def undo_normalization(image: Tensor, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """The pixels of a model's input: (C, H, W) → (H, W, 3)."""
    mean, std = (np.array(each, np.float32) for each in (preprocessing.mean, preprocessing.std))
    values = image.float().cpu().numpy().transpose(1, 2, 0) * std + mean
    return to_rgb_array(np.rint(255 * values.clip(0, 1)).astype(np.uint8))


def draw_activation_figures(statistics: ActivationStatistics) -> tuple[list[CaptionedFigure], list[str]]:
    """Figures over the images, and notes on those that cannot be drawn."""
    figures, notes = list[CaptionedFigure](), list[str]()
    if statistics.no_distances_reason:
        notes.append(f"attention distance: not defined, since {statistics.no_distances_reason}")
    else:
        distances = mean_of_known(np.concatenate(statistics.distances))  # (L, H)
        even = uniform_attention_distance(statistics.grid, statistics.patch_size(statistics.grid))
        figures.append(
            draw_attention_distance(distances, images=statistics.images, image_size=statistics.image_size, even=even)
        )
    if statistics.no_norms_reason:
        notes.append(f"token norms: layers cannot be compared, since {statistics.no_norms_reason}")
    else:
        norms = np.concatenate(statistics.norms).swapaxes(0, 1)
        figures.append(draw_token_norms(norms, statistics.token_names, statistics.grid))
    if statistics.cosines:
        figures.append(draw_class_distillation_similarity(np.concatenate(statistics.cosines).mean(0)))
    if statistics.images < MIN_CKA_IMAGES:
        notes.append(f"similarity of layers: {MIN_CKA_IMAGES} images or more are needed, not {statistics.images}")
    else:
        figures.append(draw_cka(linear_cka([np.concatenate(state) for state in statistics.means])))
    if statistics.occlusion_curves:
        curves = {name: np.concatenate(parts) for name, parts in statistics.occlusion_curves.items()}
        figures.append(
            draw_removal_curves(
                np.array(OCCLUSION_SHARES),
                curves["most"],
                curves["least"],
                curves["chance"],
                removal_method=statistics.removal_method,
                map_method=statistics.map_method,
            )
        )
    else:
        notes.append(f"occlusion check: not possible, since {statistics.no_occlusion_reason}")
    features, photos = (np.stack(parts) for parts in zip(*statistics.sampled, strict=True))
    try:
        colors = color_patches(features.reshape(len(features), *statistics.grid, -1))
    except ConfigError as error:  # too few patches
        notes.append(f"patch features: {error}")
    else:
        figures.append(draw_patch_colors(photos, colors))
    return figures, notes
