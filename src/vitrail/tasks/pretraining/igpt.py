"""Image GPT (Chen 2020): predict each pixel's palette color from the pixels before it, or masked pixels as in BERT.

The palette is k-means of the colors of training images, a function of these images and a seed.
B batch, n pixels, K colors, M points, C channels, D width.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.models.base.checks import pair
from vitrail.models.catalog.families import find_preset
from vitrail.models.igpt import IGPT
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import IgptSettings
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.image_task import check_image_source
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.pretraining.parts.masked_prediction import draw_mask
from vitrail.tasks.pretraining.parts.pretraining_figures import plot_image_rows
from vitrail.tasks.pretraining.pretraining import (
    KNN_METRIC,
    RANK_METRIC,
    SPREAD_METRIC,
    Pretraining,
    build_pretraining,
    make_relative_loss_metric,
)
from vitrail.tasks.task import BuildContext, Source, TaskKind, TaskSetup, parse_task_settings

Points = NDArray[np.float64]
PALETTE_IMAGES, PALETTE_PIXELS = 4096, 2**17  # of which it is made, at most
MAX_ITERATIONS, TOLERANCE = 50, 1e-4  # the tolerance is relative to the inertia


def sample_pixels(source: ImageSource, seed: int) -> Points:
    """The colors of random pixels of evenly spaced training images, without augmentation: (M, C)."""
    random, rows = np.random.default_rng(seed), list[Points]()
    count = min(PALETTE_IMAGES, source.example_count)
    for images in source.load_evenly_spaced_images(count):
        pixels = images.double().flatten(2).transpose(1, 2).numpy()  # (B, n, C)
        most = max(PALETTE_PIXELS // count, 1)
        for each in pixels:
            rows.append(each if len(each) <= most else each[random.choice(len(each), most, replace=False)])
    return np.concatenate(rows)


def make_palette(pixels: Points, colors: int, seed: int) -> Points:
    """The centers of the clusters of pixels, from dark to bright: (M, C) → (K, C)."""
    points, counts = np.unique(pixels, axis=0, return_counts=True)
    if len(points) < colors:
        raise ConfigError(
            f"`colors` is {colors}, but {len(pixels):,} pixels of the training images have only {len(points)} "
            f"different colors; use {len(points)} or less",
            fields=("colors",),
        )
    weights = counts.astype(np.float64)
    centers, _ = run_kmeans(points, weights, choose_spread_points(points, weights, colors, seed))
    return centers[np.lexsort((*centers.T, centers.sum(1)))]


def choose_spread_points(points: Points, weights: Points, count: int, seed: int) -> Points:
    """The first centers by k-means++ (Arthur 2007): each is drawn by its squared distance to those before."""
    random = np.random.default_rng(seed)
    chosen = [points[random.choice(len(points), p=weights / weights.sum())]]
    nearest = np.square(points - chosen[0]).sum(1)
    while len(chosen) < count:
        shares = nearest * weights
        chosen.append(points[random.choice(len(points), p=shares / shares.sum())])
        nearest = np.minimum(nearest, np.square(points - chosen[-1]).sum(1))
    return np.stack(chosen)


def run_kmeans(points: Points, weights: Points, centers: Points) -> tuple[Points, float]:
    """Lloyd's algorithm: the centers, and their inertia, the weighted sum of squared distances of all points.

    An empty cluster gets the point that is farthest from its center.
    """
    before = np.inf
    for _ in range(MAX_ITERATIONS):
        nearest, distances = assign_points(points, centers)
        inertia = float(distances @ weights)
        sizes = np.bincount(nearest, weights, len(centers))
        for empty in np.flatnonzero(sizes == 0):
            farthest = int(np.argmax(distances * (sizes[nearest] > weights)))  # not alone in its cluster
            sizes[nearest[farthest]] -= weights[farthest]
            nearest[farthest], distances[farthest], sizes[empty] = empty, 0.0, weights[farthest]
        sums = [np.bincount(nearest, weights * channel, len(centers)) for channel in points.T]
        centers = np.stack(sums, axis=1) / sizes[:, None]
        if before - inertia <= TOLERANCE * inertia:
            break
        before = inertia
    return centers, float(assign_points(points, centers)[1] @ weights)


def assign_points(points: Points, centers: Points) -> tuple[NDArray[np.intp], Points]:
    """The nearest center of each point, and the squared distance to it."""
    nearest, step = list[NDArray[np.intp]](), 2**22 // len(centers) + 1  # bounds the memory
    for start in range(0, len(points), step):
        products = points[start : start + step] @ centers.T
        nearest.append(np.argmin(np.square(centers).sum(1) - 2 * products, axis=1))
    found = np.concatenate(nearest)
    return found, np.square(points - centers[found]).sum(1)


def compute_color_entropy(pixels: Points, palette: Points) -> float:
    """The entropy of the frequencies of palette colors, in nats: the loss of a model that knows nothing else."""
    counts = np.bincount(assign_points(pixels, palette)[0], minlength=len(palette))
    shares = counts[counts > 0] / len(pixels)
    return float(-(shares * np.log(shares)).sum())


RELATIVE_LOSS_METRIC = make_relative_loss_metric("the color frequencies")
ACCURACY_METRIC = Metric(name="accuracy", label="accuracy of the predicted colors", is_share=True)
COMPLETED_IMAGES, SAMPLES = 4, 3  # of the figure; each image is completed several times
MAX_PIXELS = 64 * 64  # of an image, as in the largest published model


class ImageGpt(Pretraining):
    """The backbone predicts the palette color of each pixel. A new model gets the palette of its training images."""

    metrics = (LOSS_METRIC, RELATIVE_LOSS_METRIC, ACCURACY_METRIC, KNN_METRIC, SPREAD_METRIC, RANK_METRIC)
    backbone: IGPT

    def __init__(self, backbone: IGPT, settings: IgptSettings | None = None) -> None:
        super().__init__()
        self.backbone, self.settings = backbone, settings or IgptSettings()
        self.register_buffer("colour_entropy", torch.ones(()))  # of the training images, in nats
        self.colour_entropy: Tensor

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        if not isinstance(self.backbone, IGPT):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(self.backbone).__name__
            raise ConfigError(f"the task predicts palette colors, and this {kind} has no palette; use `model` igpt_cpu")
        config, prepared = self.backbone.config, check_image_source(source, self).preprocessing
        if config.causal is (self.settings.objective == "bert"):
            raise ConfigError(
                f"`objective` is {self.settings.objective}, and the model was built with causal={config.causal}; "
                f"expected causal={not config.causal}"
            )
        if pair(prepared.image_size) != pair(config.image_size):
            given, expected = ("×".join(map(str, pair(each.image_size))) for each in (prepared, config))
            raise ConfigError(f"images of {given} pixels for a model of {expected}; expected the same size")
        if (pixels := prod(pair(config.image_size))) > MAX_PIXELS:
            raise ConfigError(
                f"images of {pixels:,} pixels, each of which is a token; expected at most {MAX_PIXELS:,}, as 64×64: "
                "set `image_size`, since the cost of attention grows with the square of the tokens"
            )
        if {*prepared.mean, *prepared.std} != {0.5}:
            raise ConfigError(
                f"mean {prepared.mean} and std {prepared.std} of `preprocessing`; expected 0.5, since the palette is "
                "in [−1, 1]"
            )
        super().check(source, recipe, ranks)

    def initialize(self, source: Source, recipe: Recipe) -> None:
        """Make the palette, unless the model was loaded with one, and measure how often its colors occur."""
        model, images = self.backbone, check_image_source(source, self)
        pixels = sample_pixels(images, recipe.loop.seed)
        if model.has_default_palette:
            palette = make_palette(pixels, model.config.colors, recipe.loop.seed)
            model.palette.copy_(torch.from_numpy(palette))
        found = compute_color_entropy(pixels, model.palette.double().cpu().numpy())
        self.colour_entropy.fill_(max(found, 1e-6))

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        colors = self.backbone.quantize(self.normalize(batch["images"]))
        hidden = self.draw_masks(batch.keys["images"], colors)
        logits, features = self.backbone.predict(self.backbone.embed_colors(colors, hidden) + self.backbone.pos_embed)
        if hidden is not None:  # every image has as many hidden pixels
            logits, colors = logits[hidden], colors[hidden]
        logits, colors = logits.flatten(0, -2), colors.flatten()
        loss = F.cross_entropy(logits.float(), colors)
        with torch.no_grad():
            metrics = {
                "relative_loss": loss.detach() / self.colour_entropy,
                "accuracy": (logits.argmax(-1) == colors).float().mean(),
                "spread": self.measure_spread(features),
            }
        return loss, metrics

    def draw_masks(self, keys: NDArray[np.uint64], colors: Tensor) -> Tensor | None:
        """For the objective bert, the same number of hidden pixels in each image, at least one: bool (B, n)."""
        if self.settings.objective == "autoregressive":
            return None
        count = colors.shape[1]
        return draw_mask(keys, count, max(round(self.settings.mask_ratio * count), 1)).to(colors.device)

    def list_compiled_modules(self) -> list[nn.Module]:
        return [*self.backbone.blocks]  # the backbone itself is not called

    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:
        """Images, their upper half, and samples of the lower half; none for a model that is not causal."""
        batch = self.load_figure_images(source, device, COMPLETED_IMAGES)
        if not batch.size or not self.backbone.config.causal:
            return []
        colors = self.backbone.quantize(self.normalize(batch["images"]))
        completions = self.complete(colors, check_image_source(source, self).seed)
        rows = [colors, *completions]
        arrays = [self.backbone.paint(each).float().cpu().permute(0, 2, 3, 1).numpy() / 2 + 0.5 for each in rows]
        given = arrays[0].copy()
        given[:, given.shape[1] // 2 :] = 0.5
        samples = {f"sample {number}": each for number, each in enumerate(arrays[1:], start=1)}
        return [
            plot_image_rows(
                name="completions",
                title="Completions of the upper half",
                caption=(
                    f"Images in {self.backbone.config.colors} colors, the upper half that the model is given, and "
                    f"{SAMPLES} samples of the lower half, pixel by pixel at temperature 1."
                ),
                rows={"image": arrays[0], "given": given, **samples},
                arrays={"images": arrays[0], "given": given, "samples": np.stack(arrays[1:])},
            )
        ]

    def complete(self, colors: Tensor, seed: int) -> list[Tensor]:
        """Sample the lower half of images, several times: (B, n) → SAMPLES × (B, n)."""
        rows, columns = self.backbone.grid
        given = colors[:, : rows // 2 * columns].repeat(SAMPLES, 1)
        return list(self.backbone.sample(given, torch.Generator().manual_seed(seed)).chunk(SAMPLES))


def build_igpt(request: Request, context: BuildContext) -> TaskSetup:
    """The objective decides whether a new model is causal."""
    settings = parse_task_settings(TASK, request.recipe)
    name = None if request.init else request.recipe.model
    if settings.objective == "bert" and name and issubclass(find_preset(name, trusted=request.trusted)[0].build, IGPT):
        fields = {"causal": False, **request.recipe.fields}
        request = replace(request, recipe=replace(request.recipe, fields=fields))
    return build_pretraining(request, context, lambda model: ImageGpt(model, settings))


TASK = TaskKind(name="igpt", settings=IgptSettings, build=build_igpt, needs_classes=False)
