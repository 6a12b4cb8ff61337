"""All that can be seen of a model: its filters and positions, and over some pictures how it attends and what it makes.

B images, L layers, S = L + 1 states of the tokens, H heads, N tokens, D width, K shares of the patches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import ConfigError, DataError, VitrailError, unknown_name_error
from vitrail.figures import CaptionedFigure
from vitrail.inspection.attention_distance import (
    attention_distance,
    plot_attention_distance,
    uniform_attention_distance,
)
from vitrail.inspection.capture import capture_attention, capture_tokens, prefix_token_names
from vitrail.inspection.cka import MIN_CKA_IMAGES, linear_cka, plot_cka
from vitrail.inspection.explain import Explainer
from vitrail.inspection.explain_options import ExplainOptions
from vitrail.inspection.filters import find_first_filters, plot_filters, principal_filters
from vitrail.inspection.occlusion import plot_occlusion
from vitrail.inspection.patch_removal import can_drop_tokens, probabilities_without_patches
from vitrail.inspection.position_similarity import find_position_table, plot_position_similarity, position_similarity
from vitrail.inspection.token_statistics import plot_token_norms, plot_token_similarity, token_norms, token_similarity
from vitrail.predict.predictions import NOT_FINITE_MESSAGE

Arrays = list[NDArray[Any]]  # of one batch each
OCCLUSION_SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # of the patches, for the occlusion check

FIGURE_NAMES = (  # of all figures that a model may have
    *("filters", "position_similarity", "attention_distance", "token_norms", "token_similarity", "alignment"),
    "occlusion",
)


@dataclass(frozen=True)
class ModelFigures:
    """What was seen of a model, each plate a picture with its numbers."""

    figures: tuple[CaptionedFigure, ...]
    images: int
    notes: tuple[str, ...] = ()  # what could not be drawn, and why
    skipped: tuple[str, ...] = ()  # pictures that could not be read, and why

    def __getitem__(self, name: str) -> CaptionedFigure:
        found = {each.name: each for each in self.figures}
        if name not in found:
            raise unknown_name_error("plate", name, found)
        return found[name]


def look(
    model: str | Path | nn.Module | Explainer,
    images: Iterable[Any] = (),
    *,
    batch: int = 4,
    options: ExplainOptions | None = None,
    progress: Callable[[int], object] | None = None,
) -> ModelFigures:
    """Draws filters and positions, and over the pictures attention distance, tokens, alignment and the occlusion check.

    Images are of any kind that `open_image` takes. The occlusion check is of the map that
    `question` asks for, `Explainer.usual` unless given. Whatever their number, no more than a batch of them is held.
    """
    if batch < 1:
        raise ConfigError(f"batch is {batch}; expected 1 or more")
    explainer = model if isinstance(model, Explainer) else Explainer(model)
    options = explainer.resolve_options(options or ExplainOptions(method=explainer.default_method))
    plates, notes = draw_weight_figures(explainer.model)
    seen, skipped, part = ActivationStatistics(), list[str](), list[Tensor]()
    for image in images:
        try:
            part.append(explainer.viewer.see([image]))
        except DataError as error:
            skipped.append(str(error))
        if len(part) == batch:
            seen.add_batch(explainer, torch.cat(part), options)
            part.clear()
        if progress is not None:
            progress(1)
    if part:
        seen.add_batch(explainer, torch.cat(part), options)
    if skipped and not seen.images:
        raise DataError(f"no picture to look at; {len(skipped)} cannot be read, for instance {skipped[0]}")
    if seen.images:
        drawn, more = draw_activation_figures(seen)
        plates, notes = plates + drawn, notes + more
    else:
        notes.append("no pictures were shown: attention distance, tokens, alignment and the occlusion check need some")
    return ModelFigures(tuple(plates), seen.images, tuple(notes), tuple(skipped))


def draw_weight_figures(model: Any) -> tuple[list[CaptionedFigure], list[str]]:
    """What the weights alone show."""
    plates, notes = list[CaptionedFigure](), list[str]()
    table = find_position_table(model)
    if table is None:
        notes.append("position similarity: this model adds no table of positions to its tokens")
    else:
        plates.append(plot_position_similarity(position_similarity(table, model.grid)))
    filters = find_first_filters(model)
    if filters is None or len(filters) < 2:
        notes.append("filters: this model has no convolution that sees the image")
    else:
        plates.append(plot_filters(*principal_filters(filters)))
    return plates, notes


@dataclass
class ActivationStatistics:
    """Numbers of all images so far; of each so few that thousands fit in memory: no map and no token."""

    images: int = 0
    distances: Arrays = field(default_factory=Arrays)  # (B, L, H)
    no_distances_reason: str = ""  # why there are none
    no_occlusion_reason: str = "this model has no head, so no class whose probability could be watched"
    norms: Arrays = field(default_factory=Arrays)  # (B, S, N)
    means: Arrays = field(default_factory=Arrays)  # (B, S, D)
    cosines: Arrays = field(default_factory=Arrays)  # (B, S)
    removal_method: str = ""  # in which patches were removed
    occlusion_curves: dict[str, Arrays] = field(
        default_factory=dict[str, Arrays]
    )  # probabilities, by what went first: (B, K)
    grid: tuple[int, int] = (0, 0)
    token_names: tuple[str, ...] = ()  # of the prefix tokens
    image_size: tuple[int, int] = (0, 0)

    def add_batch(self, explainer: Explainer, pixels: Tensor, options: ExplainOptions) -> None:
        """One batch: (B, C, H, W)."""
        model, self.image_size = explainer.model, (pixels.shape[2], pixels.shape[3])

        def distance(weights: Tensor, grid: tuple[int, int]) -> NDArray[Any]:
            return attention_distance(weights.cpu().numpy(), grid, self.patch_size(grid))

        mixed = [why for each in explainer.layers if (why := getattr(each, "no_shares", ""))]
        self.no_distances_reason = explainer.no_maps_reason or next(iter(mixed), "")
        asked = [] if self.no_distances_reason else None
        with torch.no_grad(), capture_attention(model, asked, keep=distance) as seen, capture_tokens(model) as states:
            model.tokens(pixels)
        self.grid, self.token_names = seen.patch_grid, prefix_token_names(model, seen.prefix)
        if not self.no_distances_reason:
            self.distances.append(np.stack(seen.maps, axis=1))
        tokens = [each.float().cpu().numpy() for each in states[:-1]]  # before the final norm, which evens lengths out
        if not np.isfinite(tokens[-1]).all():
            raise VitrailError(NOT_FINITE_MESSAGE)
        late = [(0, 0), (seen.token_count, 0)]  # a class token that joins later has no length before
        lengths = [np.pad(token_norms(each), late, constant_values=np.nan)[:, -seen.token_count :] for each in tokens]
        self.norms.append(np.stack(lengths, axis=1))
        self.means.append(np.stack([each.mean(1) for each in tokens], axis=1))
        if "distill" in self.token_names:
            self.cosines.append(np.stack([token_similarity(each[:, 0], each[:, 1]) for each in tokens], axis=1))
        if explainer.no_maps_reason:
            self.no_occlusion_reason = explainer.no_maps_reason
        elif explainer.viewer.classes:
            self.add_occlusion(explainer, pixels, options)
        self.images += len(pixels)

    def patch_size(self, grid: tuple[int, int]) -> tuple[float, float]:
        """Pixels to a patch."""
        return self.image_size[0] / grid[0], self.image_size[1] / grid[1]

    def add_occlusion(self, explainer: Explainer, pixels: Tensor, options: ExplainOptions) -> None:
        logits, maps = explainer.compute_maps(pixels, options)
        self.removal_method = "left out" if can_drop_tokens(explainer.model) else "replaced by the mean colour"
        chance = np.stack([np.random.default_rng(self.images + n).random(self.grid) for n in range(len(pixels))])
        attended, classes = maps[:, -1, -1], logits.argmax(-1)
        whole = logits.float().softmax(-1).gather(1, classes[:, None]).cpu().numpy()  # nothing is removed yet
        for name, by, most in (("most", attended, True), ("least", attended, False), ("chance", chance, True)):
            found = probabilities_without_patches(explainer.model, pixels, by, classes, OCCLUSION_SHARES[1:], most=most)
            self.occlusion_curves.setdefault(name, []).append(np.concatenate([whole, found], axis=1))


def draw_activation_figures(seen: ActivationStatistics) -> tuple[list[CaptionedFigure], list[str]]:
    """What pictures show."""
    plates, notes = list[CaptionedFigure](), list[str]()
    if seen.no_distances_reason:
        notes.append(f"attention distance: none, {seen.no_distances_reason}")
    else:
        distances = np.nanmean(np.concatenate(seen.distances), axis=0)  # (L, H)
        even = uniform_attention_distance(seen.grid, seen.patch_size(seen.grid))
        plates.append(plot_attention_distance(distances, images=seen.images, image_size=seen.image_size, even=even))
    plates.append(plot_token_norms(np.concatenate(seen.norms).swapaxes(0, 1), seen.token_names, seen.grid))
    if seen.cosines:
        plates.append(plot_token_similarity(np.concatenate(seen.cosines).mean(0)))
    if seen.images < MIN_CKA_IMAGES:
        notes.append(f"alignment of the layers: too few pictures, {seen.images}; expected {MIN_CKA_IMAGES} or more")
    else:
        plates.append(plot_cka(linear_cka(np.concatenate(seen.means).swapaxes(0, 1))))
    if seen.occlusion_curves:
        curves = {name: np.concatenate(parts) for name, parts in seen.occlusion_curves.items()}
        plates.append(
            plot_occlusion(
                np.array(OCCLUSION_SHARES),
                curves["most"],
                curves["least"],
                curves["chance"],
                removal_method=seen.removal_method,
            )
        )
    else:
        notes.append(f"occlusion check: none, {seen.no_occlusion_reason}")
    return plates, notes
