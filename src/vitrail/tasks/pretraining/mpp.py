"""Masked patch prediction (Dosovitskiy 2020, arXiv 2010.11929, appendix B.1.2): half of the patch embeddings are
corrupted, and the colors of these patches are predicted from their own output tokens.

What the paper leaves open: exactly half of the patches of an image are corrupted, chosen by ranking random numbers, and
each of them becomes the mask token, another patch or stays, by a random number of its own. Another patch is one of the
same image, with its embedding before the corruption. The class of a color is r + 8·g + 64·b with r, g and b the floor
of 8 times the mean, from 0 to 7, so a mean of exactly k/8 is in bin k.

B images, C channels, n patches of p×q pixels, K of them corrupted, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import pair
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import MppSettings
from vitrail.tasks.image_task import check_image_source
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.pretraining.parts.masked_prediction import (
    BASELINE_IMAGES,
    RELATIVE_LOSS_METRIC,
    MaskedPrediction,
    compute_mean_color_error,
    draw_noise,
    join_patches,
    split_by_noise,
    split_into_patches,
    take_patches,
)
from vitrail.tasks.pretraining.parts.pretraining_figures import plot_image_rows
from vitrail.tasks.pretraining.pretraining import KNN_METRIC, RANK_METRIC, SPREAD_METRIC, make_pretraining_kind
from vitrail.tasks.task import Source

BINS = 8  # 3 bits per channel
SMALL_SIDE = 4  # cells per side of a downsized patch
MAX_COLOR_CHANNELS = 4  # 8⁴ = 4096 classes
ACCURACY_METRIC = Metric(name="accuracy", label="accuracy of the colors", is_share=True, quantity="accuracy")


class Mpp(MaskedPrediction):
    """The loss is the mean over the corrupted patches of every image, which are equally many.

    With colors as targets it is the cross-entropy, ln 512 at the start, since the head is zero; with pixels it is the
    mean squared error of pixels from 0 to 1.
    """

    method = "masked patch prediction"
    metrics = (LOSS_METRIC, ACCURACY_METRIC, RELATIVE_LOSS_METRIC, KNN_METRIC, SPREAD_METRIC, RANK_METRIC)
    shares = ("accuracy", "commonest")

    def __init__(self, backbone: Any, settings: MppSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or MppSettings()
        self.backbone = backbone
        self.baseline = 1.0  # for pixels: the loss of each image's mean color; known after `setup`
        self.commonest = 0  # the commonest class of training images; known after `setup`
        level, channels = backbone.levels[-1], backbone.config.channels
        self.mask_token = nn.Parameter(torch.empty(level.width))
        nn.init.normal_(self.mask_token, std=0.02)
        self.cells = {"mean_color": 1, "small_patch": SMALL_SIDE}.get(self.settings.target)  # per side; None: pixels
        outputs = self.patch[0] * self.patch[1] * channels
        if self.cells is not None and channels <= MAX_COLOR_CHANNELS:  # otherwise `check` refuses it
            outputs = self.cells**2 * BINS**channels
        self.head = nn.Linear(level.width, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        super().check(source, recipe, ranks)
        size, channels = pair(self.backbone.config.image_size), self.backbone.config.channels
        if self.cells is not None and channels > MAX_COLOR_CHANNELS:
            raise ConfigError(
                f"`target` is {self.settings.target} for images of {channels} channels, {BINS}^{channels} colors; "
                f"expected at most {MAX_COLOR_CHANNELS} channels: use target pixels",
                fields=("target",),
            )
        if self.cells is not None and min(self.patch) < self.cells:
            raise ConfigError(
                f"`target` is {self.settings.target} for patches of {self.patch[0]}×{self.patch[1]} pixels; expected "
                f"at least {self.cells}×{self.cells}: use target mean_color or pixels, or a larger patch_size",
                fields=("target",),
            )
        count_corrupted(size[0] * size[1] // (self.patch[0] * self.patch[1]), self.settings)

    def setup(self, source: Source, recipe: Recipe) -> None:
        super().setup(source, recipe)
        images = check_image_source(source, self)
        if self.cells is None:
            std = torch.tensor(images.preprocessing.std)
            self.baseline = compute_mean_color_error(images, power=2, scale=std)
            return
        counts = torch.zeros(BINS**self.backbone.config.channels, dtype=torch.int64)
        for batch in images.load_evenly_spaced_images(BASELINE_IMAGES):
            pixels = split_into_patches(self.scale_pixels(batch), self.patch)
            counts += classify_colors(pixels, self.patch, self.cells).flatten().bincount(minlength=len(counts))
        self.commonest = int(counts.argmax())

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        images = self.normalize(batch["images"])
        count = images.shape[-2] * images.shape[-1] // (self.patch[0] * self.patch[1])
        corruption = draw_corruption(batch.keys["images"], count, self.settings).to(images.device)
        tokens, predictions = self.predict(images, corruption)
        pixels = take_patches(split_into_patches(self.scale_pixels(batch["images"]), self.patch), corruption.corrupted)
        loss, metrics = self.compute_loss(predictions, pixels)
        spread = self.measure_spread(tokens.mean(1))  # the loss does not depend on the class token
        return loss, {**metrics, "spread": spread}

    def predict(self, images: Tensor, corruption: "Corruption") -> tuple[Tensor, Tensor]:
        """All output tokens, and the output of the head for the corrupted patches: (B, n, D), (B, K, outputs)."""
        patches, grid = self.backbone.patches(images)
        x = take_patches(patches, corruption.sources)
        x = torch.where(corruption.masked[..., None], self.mask_token.to(x.dtype), x)
        tokens = self.encode(self.backbone.add_positions(x, grid), grid)
        return tokens, self.head(take_patches(tokens, corruption.corrupted))

    def compute_loss(self, predictions: Tensor, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """For predictions (B, K, outputs) of patches (B, K, p·q·C) with pixels from 0 to 1."""
        if self.cells is None:
            loss = F.mse_loss(predictions.float(), pixels)
            return loss, {"relative_loss": loss.detach() / self.baseline}
        classes = classify_colors(pixels, self.patch, self.cells)  # (B, K, cells²)
        logits = predictions.unflatten(-1, (self.cells**2, -1))
        loss = F.cross_entropy(logits.flatten(0, 2).float(), classes.flatten())
        hits, common = logits.detach().argmax(-1) == classes, classes == self.commonest
        return loss, {"accuracy": hits.float().mean(), "commonest": common.float().mean()}

    def load_parts(self, tensors: Mapping[str, Tensor]) -> str:
        """From a run with the same target."""
        return self.load_own_weights(tensors, {})

    @torch.no_grad()
    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:
        batch = self.load_figure_images(source, device)
        if not batch.size:
            return []
        images = self.normalize(batch["images"])
        grid = (images.shape[-2] // self.patch[0], images.shape[-1] // self.patch[1])
        corruption = draw_corruption(batch.keys["images"], grid[0] * grid[1], self.settings).to(device)
        with temporary_eval_mode(self):
            _, outputs = self.predict(images, corruption)
        true = self.scale_pixels(batch["images"])
        patches, corrupted = split_into_patches(true, self.patch), corruption.corrupted
        places = corrupted[..., None].expand(-1, -1, patches.shape[-1])
        shown = torch.where(corruption.masked[..., None], 0.5, take_patches(patches, corruption.sources))
        targets = take_patches(patches, corrupted)
        if self.cells is None:
            predicted = outputs.float()
        else:
            channels, logits = true.shape[1], outputs.unflatten(-1, (self.cells**2, -1))
            predicted, targets = (
                fill_cells(classes, channels, self.patch, self.cells)
                for classes in (logits.argmax(-1), classify_colors(targets, self.patch, self.cells))
            )
        loss, metrics = self.compute_loss(outputs, take_patches(patches, corrupted))
        versions = {
            "input": true,
            "corrupted": join_patches(shown, self.patch, grid),
            "target": join_patches(patches.scatter(1, places, targets), self.patch, grid),
            "prediction": join_patches(patches.scatter(1, places, predicted), self.patch, grid),
        }
        rows = {label: images.float().clamp(0, 1).movedim(1, -1).cpu().numpy() for label, images in versions.items()}
        arrays = {label: (255 * row).round().astype(np.uint8) for label, row in rows.items()}
        what = {"mean_color": "mean colors", "small_patch": "4×4 colors", "pixels": "pixels"}[self.settings.target]
        result = f"accuracy {float(metrics['accuracy']):.1%}" if "accuracy" in metrics else f"loss {float(loss):.4f}"
        return [
            plot_image_rows(
                name="patch_prediction",
                title=f"Prediction of the {what} of corrupted patches",
                caption=f"Images, the same with {self.settings.corrupt_ratio:.0%} of the patches corrupted "
                f"(gray: mask token; some are other patches, some unchanged), and with the true and the predicted "
                f"{what} of the corrupted patches ({result}).",
                rows=rows,
                arrays={**arrays, "corrupted_patches": corrupted.sort(1).values.cpu().numpy()},
            )
        ]


@dataclass(frozen=True)
class Corruption:
    """What becomes of the patches of each image."""

    corrupted: Tensor  # indices of the patches to predict: (B, K)
    sources: Tensor  # the patch whose embedding each one gets, by default its own: (B, n)
    masked: Tensor  # bool, whether it becomes the mask token: (B, n)

    def to(self, device: torch.device) -> "Corruption":
        return Corruption(self.corrupted.to(device), self.sources.to(device), self.masked.to(device))


def count_corrupted(count: int, settings: MppSettings) -> int:
    """The number of corrupted patches, rounded half up; an error if there is none."""
    corrupted = int(settings.corrupt_ratio * count + 0.5)
    if not corrupted:
        raise ConfigError(
            f"`corrupt_ratio` is {settings.corrupt_ratio:g}, which corrupts none of {count} patches; expected at least "
            f"{1 / count:.2g}",
            fields=("corrupt_ratio",),
        )
    return corrupted


def draw_corruption(keys: NDArray[np.uint64], count: int, settings: MppSettings) -> Corruption:
    """Corrupt exactly round(corrupt_ratio · count) patches of each image, by its key: (B,)."""
    noise = draw_noise(keys, 3 * count)  # which patches are corrupted, how, and by which other patch
    corrupted, _ = split_by_noise(noise[:, :count], count_corrupted(count, settings))
    chosen = torch.zeros(len(keys), count, dtype=torch.bool).scatter_(1, corrupted, value=True)
    kind, offset = (torch.from_numpy(each) for each in (noise[:, count : 2 * count], noise[:, 2 * count :]))
    masked = chosen & (kind < settings.mask_share)
    swapped = chosen & ~masked & (kind < settings.mask_share + settings.swap_share)
    own = torch.arange(count).expand(len(keys), -1)
    others = (own + 1 + (offset * (count - 1)).long()) % count  # never the patch itself
    return Corruption(corrupted, torch.where(swapped, others, own), masked)


def classify_colors(patches: Tensor, patch: Grid, cells: int) -> Tensor:
    """The class of the mean color of each of cells×cells parts: (B, K, p·q·C), from 0 to 1 → (B, K, cells²).

    With 2 channels or more the first one has the lowest digit in base 8. Parts overlap if `cells` does not divide p.
    """
    pixels = patches.unflatten(-1, (*patch, -1)).movedim(-1, 2)  # (B, K, C, p, q)
    means = F.adaptive_avg_pool2d((pixels * 255).round().flatten(0, 1), cells)  # sums of integers are exact
    digits = (means * BINS / 255).floor().clamp(max=BINS - 1).long()  # (B·K, C, cells, cells)
    values = BINS ** torch.arange(digits.shape[1], device=digits.device)
    return (digits * values[:, None, None]).sum(1).flatten(1).unflatten(0, patches.shape[:2])


def fill_cells(classes: Tensor, channels: int, patch: Grid, cells: int) -> Tensor:
    """Patches with the middle of each color's bin in their cells: (B, K, cells²) → (B, K, p·q·C), from 0 to 1."""
    digits = torch.stack([classes // BINS**channel % BINS for channel in range(channels)], dim=2)  # (B, K, C, cells²)
    colors = ((digits + 0.5) / BINS).unflatten(-1, (cells, cells)).flatten(0, 1)
    filled = F.interpolate(colors, size=patch, mode="nearest")
    return filled.movedim(1, -1).flatten(1).unflatten(0, classes.shape[:2])


TASK = make_pretraining_kind("mpp", MppSettings, Mpp)
