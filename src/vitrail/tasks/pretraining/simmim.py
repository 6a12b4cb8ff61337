"""SimMIM (Xie 2021, arXiv 2111.09886): squares of the image are masked, and one linear layer predicts their pixels.

B images, C channels, n = h·w patches of p×q pixels, K of them hidden, D width.
"""

import math
from collections.abc import Mapping
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
from vitrail.recipes.task_settings import SimMimSettings
from vitrail.tasks.image_task import check_image_source
from vitrail.tasks.pretraining.parts.masked_prediction import (
    MaskedPrediction,
    compute_mean_color_error,
    draw_noise,
    join_patches,
    split_by_noise,
    split_into_patches,
    take_patches,
)
from vitrail.tasks.pretraining.parts.pretraining_figures import (
    Reconstruction,
    make_reconstruction,
    make_reconstruction_figure,
)
from vitrail.tasks.pretraining.pretraining import make_pretraining_kind
from vitrail.tasks.task import Source

MASK_TOKEN_NAMES = ("encoder.mask_token", "vit.embeddings.mask_token")  # the authors', transformers'


class SimMim(MaskedPrediction):
    """The loss is the mean absolute error of normalized pixels in hidden squares.

    Every image has the same number of hidden squares, so micro-batches and processes have equal weight.
    """

    method = "SimMIM"

    def __init__(self, backbone: Any, settings: SimMimSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or SimMimSettings()
        self.backbone = backbone
        self.baseline = 1.0  # the loss of each image's mean color; known after `setup`
        width, pixels = backbone.levels[-1].width, self.patch[0] * self.patch[1]
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.mask_token, std=0.02, a=-0.02, b=0.02)
        # the authors' names; a pixel shuffle would put its outputs into place: channel, row, column
        self.decoder = nn.Sequential(nn.Conv2d(width, pixels * backbone.config.channels, 1))

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        super().check(source, recipe, ranks)
        count_hidden_squares(pair(self.backbone.config.image_size), self.patch, self.settings)

    def setup(self, source: Source, recipe: Recipe) -> None:
        super().setup(source, recipe)
        self.baseline = compute_mean_color_error(check_image_source(source, self), power=1)

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        images = self.normalize(batch["images"])
        size = (images.shape[-2], images.shape[-1])
        hidden = hide_squares(batch.keys["images"], size, self.patch, self.settings).to(images.device)
        tokens, predictions = self.predict(images, hidden)
        loss = self.compute_loss(images, predictions, hidden)
        spread = self.measure_spread(tokens.mean(1))  # the loss does not depend on the class token
        return loss, {"relative_loss": loss.detach() / self.baseline, "spread": spread}

    def predict(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """All output tokens, and the pixels of the hidden patches (B, K): (B, n, D), (B, K, C·p·q)."""
        count = images.shape[-2] * images.shape[-1] // (self.patch[0] * self.patch[1])
        mask = torch.zeros(len(images), count, dtype=torch.bool, device=images.device).scatter_(1, hidden, value=True)
        tokens = self.encode(*self.backbone.embed(images, hidden=mask, mask_token=self.mask_token))
        layer: Any = self.decoder[0]
        return tokens, F.linear(take_patches(tokens, hidden), layer.weight.flatten(1), layer.bias)

    def compute_loss(self, images: Tensor, predictions: Tensor, hidden: Tensor) -> Tensor:
        channels = images.shape[1]
        patches = take_patches(split_into_patches(images, self.patch), hidden)
        targets = patches.unflatten(-1, (-1, channels))  # (B, K, p·q, C)
        errors = F.l1_loss(predictions.float(), targets.transpose(-1, -2).flatten(2), reduction="sum")
        return errors / (targets.numel() / channels + 1e-5) / channels  # 1e-5 as in the authors' code

    def load_parts(self, tensors: Mapping[str, Tensor]) -> str:
        """From a run, or from a file of the authors or of transformers."""
        return self.load_own_weights(tensors, {"mask_token": MASK_TOKEN_NAMES})

    @torch.no_grad()
    def reconstruct(self, images: Tensor, keys: NDArray[np.uint64]) -> Reconstruction:
        """Predict the hidden squares of images, uint8 (B, C, H, W); masks are drawn by the keys."""
        assert self.preprocessing is not None, "called before `setup`"
        inputs = self.normalize(images)
        size = (inputs.shape[-2], inputs.shape[-1])
        hidden = hide_squares(keys, size, self.patch, self.settings).to(inputs.device)
        with temporary_eval_mode(self):
            _, predictions = self.predict(inputs, hidden)
        cells = predictions.float().unflatten(-1, (inputs.shape[1], -1)).transpose(-1, -2).flatten(2)  # (B, K, p·q·C)
        pixels, places = split_into_patches(inputs, self.patch), hidden[..., None].expand_as(cells)
        grid = (size[0] // self.patch[0], size[1] // self.patch[1])
        pasted = join_patches(pixels.scatter(1, places, cells), self.patch, grid)
        masks = join_patches(torch.zeros_like(pixels).scatter(1, places, 1.0), self.patch, grid)
        return make_reconstruction(inputs, pasted, masks[:, 0] > 0, self.preprocessing)

    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:
        batch = self.load_figure_images(source, device)
        if not batch.size:
            return []
        caption = (
            f"Images, the same with {self.settings.mask_ratio:.0%} of the squares of {self.settings.mask_size} pixels "
            "masked, with the predicted pixels in these squares, and the absolute error, from black to its largest "
            "value."
        )
        return [make_reconstruction_figure(self.reconstruct(batch["images"], batch.keys["images"]), caption)]


def count_hidden_squares(size: Grid, patch: Grid, settings: SimMimSettings) -> tuple[int, int]:
    """How many squares are hidden, and how many an image has; an error if the squares do not fit."""
    side = settings.mask_size
    if side % patch[0] or side % patch[1]:
        near = math.lcm(*patch) * max(round(side / math.lcm(*patch)), 1)
        raise ConfigError(
            f"`mask_size` is {side} for patches of {patch[0]}×{patch[1]} pixels; expected a multiple of these, for "
            f"example {near}",
            fields=("mask_size",),
        )
    if size[0] % side or size[1] % side:
        raise ConfigError(
            f"`mask_size` is {side} for images of {size[0]}×{size[1]} pixels; expected a divisor of both, for example "
            f"{math.gcd(*size, 2 * math.lcm(*patch))}",
            fields=("mask_size",),
        )
    count = (size[0] // side) * (size[1] // side)
    hidden = math.ceil(settings.mask_ratio * count)
    if not 0 < hidden < count:
        raise ConfigError(
            f"`mask_ratio` is {settings.mask_ratio:g} and `mask_size` {side}, which hides {hidden} of {count} squares; "
            "expected to hide some of them and not all: change the ratio, or use smaller squares",
            fields=("mask_ratio", "mask_size"),
        )
    return hidden, count


def hide_squares(keys: NDArray[np.uint64], size: Grid, patch: Grid, settings: SimMimSettings) -> Tensor:
    """The indices of the patches in random squares, in ceil(mask_ratio · squares) of them: (B,) → (B, K)."""
    hidden, count = count_hidden_squares(size, patch, settings)
    side, grid = settings.mask_size, (size[0] // patch[0], size[1] // patch[1])
    patches = torch.arange(grid[0] * grid[1]).reshape(size[0] // side, side // patch[0], size[1] // side, -1)
    inside = patches.transpose(1, 2).reshape(count, -1)  # the patches of each square
    chosen, _ = split_by_noise(draw_noise(keys, count), hidden)
    return inside[chosen].flatten(1)


TASK = make_pretraining_kind("simmim", SimMimSettings, SimMim)
