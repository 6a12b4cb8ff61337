"""MAE (He 2021, arXiv 2111.06377): encode the visible patches, and predict the pixels of the others.

B batch, E prefix tokens, n patches, K visible and M hidden ones, D width.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import floor
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.figures import CaptionedFigure
from vitrail.base.text import format_count
from vitrail.checkpoint.layouts.self_supervised import collect_decoder
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.layers.positions import Grid, sinusoid_2d
from vitrail.models.base.contract import ImageModel
from vitrail.models.parts.encoder import make_blocks
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import MaeSettings
from vitrail.tasks.image_task import check_patches_can_be_dropped
from vitrail.tasks.metric import LOSS_METRIC, SPREAD_SIGN, CollapseSign
from vitrail.tasks.pretraining.parts.masked_prediction import (
    compute_patch_statistics,
    draw_noise,
    join_patches,
    normalize_patches,
    split_by_noise,
    split_into_patches,
    take_patches,
)
from vitrail.tasks.pretraining.parts.pretraining_figures import (
    Reconstruction,
    make_reconstruction,
    make_reconstruction_figure,
)
from vitrail.tasks.pretraining.pretraining import (
    KNN_METRIC,
    RANK_METRIC,
    SPREAD_METRIC,
    Pretraining,
    build_pretraining,
    make_relative_loss_metric,
)
from vitrail.tasks.task import BuildContext, Source, TaskKind, TaskSetup, parse_task_settings

RELATIVE_LOSS_METRIC = make_relative_loss_metric("the mean patch")
AUTHORS_HEAD_WIDTH = 32  # of the decoder
NORM_EPSILON = 1e-6


class MaeDecoder(nn.Module):
    """Tokens of the visible patches → pixels of the hidden ones: (B, E + K, D) → (B, M, pixels of a patch).

    E prefix tokens, K visible and M hidden patches, W width. The parameters have the names of the authors' files.
    """

    def __init__(
        self, input_width: int, grid: Grid, pixels: int, *, prefix: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.decoder_embed = nn.Linear(input_width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        positions = torch.empty(1, prefix + grid[0] * grid[1], width)
        self.decoder_pos_embed = nn.Parameter(positions, requires_grad=False)  # fixed; files contain it
        rates = (0.0, 0.0, 0.0)
        self.decoder_blocks = make_blocks(depth, width, heads, 4 * width, norm_eps=NORM_EPSILON, rates=rates)
        self.decoder_norm = nn.LayerNorm(width, NORM_EPSILON)
        self.decoder_pred = nn.Linear(width, pixels)
        if not positions.is_meta:
            self.draw_weights()

    @torch.no_grad()
    def draw_weights(self) -> None:
        draw_xavier_weights(self)
        nn.init.normal_(self.mask_token, std=0.02)
        table = make_position_table(self.grid, self.mask_token.shape[-1])
        self.decoder_pos_embed.copy_(F.pad(table, (0, 0, self.prefix, 0)))  # prefix tokens have rows of zeros

    def forward(self, tokens: Tensor, kept: Tensor, hidden: Tensor) -> Tensor:
        """`kept` (B, K) and `hidden` (B, M) are indices of patches, in the order of the tokens and of the output."""
        table, prefix = self.decoder_pos_embed[0], self.prefix
        x = self.decoder_embed(tokens)
        x = torch.cat([x[:, :prefix] + table[:prefix], x[:, prefix:] + table[prefix:][kept]], dim=1)
        # attention ignores the order of tokens: with the hidden ones first, the last block computes only them
        x = torch.cat([self.mask_token + table[prefix:][hidden], x], dim=1)
        *body, last = self.decoder_blocks
        for block in body:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(last(x, None, hidden.shape[1])))


def make_position_table(grid: Grid, width: int) -> Tensor:
    """Sines and cosines in the authors' order: columns, then rows; of each all sines, then all cosines: (n, W)."""
    return sinusoid_2d(grid, width).unflatten(-1, (2, -1, 2)).transpose(-1, -2).flatten(-3)


@torch.no_grad()
def draw_xavier_weights(module: nn.Module) -> None:
    """Draw linear layers and kernels, as linear layers, from Xavier's uniform distribution; biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.flatten(1))  # a view
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class MaskedAutoencoder(Pretraining):
    """The backbone encodes a random part of the patches; a decoder, which is not saved with it, predicts the others."""

    metrics = (LOSS_METRIC, RELATIVE_LOSS_METRIC, KNN_METRIC, SPREAD_METRIC, RANK_METRIC)
    collapse_signs: ClassVar[tuple[CollapseSign, ...]] = (
        SPREAD_SIGN,
        CollapseSign(
            metric="relative_loss",
            above=0.999,
            meaning="the predictions are no better than the mean patch",
            remedy="change `lr`, use a lower `mask_ratio`, or a longer `warmup`",
            windows=20,  # at first no model is better
            steps=200,
        ),
    )

    def __init__(self, backbone: ImageModel, settings: MaeSettings | None = None) -> None:
        super().__init__()
        self.backbone, self.settings = backbone, settings or MaeSettings()
        self.patch, self.grid = backbone.levels[-1].stride, backbone.grid
        self.patches = self.grid[0] * self.grid[1]
        self.kept = int(self.patches * (1 - self.settings.mask_ratio))  # as in the authors' code
        self.decoder = self.make_decoder(self.settings)

    def make_decoder(self, settings: MaeSettings) -> MaeDecoder:
        return MaeDecoder(
            self.backbone.levels[-1].width,
            self.grid,
            self.patch[0] * self.patch[1] * self.backbone.config.channels,
            prefix=self.backbone.prefix,
            width=settings.decoder_width,
            depth=settings.decoder_depth,
            heads=settings.decoder_heads,
        )

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        check_patches_can_be_dropped("MAE", self.backbone)
        check_encoder(self.backbone)
        if not 0 < self.kept < self.patches:
            largest = floor(1000 * (1 - 1 / self.patches) - 1e-6) / 1000  # rounded down, so that one patch is kept
            what, expected = ("hides none", "more than 0") if self.kept else ("keeps none", f"at most {largest}")
            raise ConfigError(
                f"`mask_ratio` is {self.settings.mask_ratio:g}, which {what} of {self.patches} patches; expected "
                f"{expected}",
                fields=("mask_ratio",),
            )
        super().check(source, recipe, ranks)

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        images = self.normalize(batch["images"])
        kept, hidden = self.draw_masks(batch.keys["images"], images.device)
        tokens = self.encode(images, kept)
        with torch.no_grad():
            targets = self.make_targets(images, hidden)
            baseline = compute_baseline(targets, self.compared_ranks, centered=self.settings.normalize_pixels)
            spread = self.measure_spread(tokens[:, self.backbone.prefix :].mean(1))
        loss = F.mse_loss(self.decoder(tokens, kept, hidden).float(), targets)  # every image has as many hidden patches
        return loss, {"relative_loss": loss.detach() / baseline, "baseline_loss": baseline, "spread": spread}

    def draw_masks(self, keys: NDArray[np.uint64], device: torch.device) -> tuple[Tensor, Tensor]:
        """The indices of the visible and of the hidden patches: (B, K), (B, M)."""
        kept, hidden = split_by_noise(draw_noise(keys, self.patches), self.kept)
        return kept.to(device), hidden.to(device)

    def encode(self, images: Tensor, kept: Tensor) -> Tensor:
        """The tokens of the visible patches after the final norm, prefix first: (B, E + K, D)."""
        x, grid = self.backbone.embed(images, kept=kept)
        return self.backbone.get_submodule(self.backbone.final_norm)(self.backbone.run(x, grid))

    def make_targets(self, images: Tensor, hidden: Tensor) -> Tensor:
        """The pixels of the hidden patches: (B, M, P·Q·C)."""
        pixels = take_patches(split_into_patches(images, self.patch), hidden)
        return normalize_patches(pixels) if self.settings.normalize_pixels else pixels

    def load_parts(self, tensors: Mapping[str, Tensor]) -> str:
        """Load the decoder of a file of the authors or of transformers, with the width and depth that it has there."""
        found = collect_decoder(tensors)
        if not found:
            return ""
        blocks = {name.split(".")[1] for name in found if name.startswith("decoder_blocks.")}
        width, depth = len(found["decoder_embed.weight"]), len(blocks)
        heads = self.settings.decoder_heads  # a file does not say; those of the authors are 32 wide
        if width != self.settings.decoder_width and width % AUTHORS_HEAD_WIDTH == 0:
            heads = width // AUTHORS_HEAD_WIDTH
        self.settings = replace(self.settings, decoder_width=width, decoder_depth=depth, decoder_heads=heads)
        self.decoder = self.make_decoder(self.settings)
        own = self.decoder.state_dict()
        table = found.pop("decoder_pos_embed", own["mask_token"])
        fits = table.shape == own["decoder_pos_embed"].shape
        found["decoder_pos_embed"] = table if fits else own["decoder_pos_embed"]  # fixed: another grid has its own
        for name in sorted({*own, *found}):
            given, expected = (tuple(each[name].shape) if name in each else "missing" for each in (found, own))
            if given != expected:
                raise CheckpointError(
                    f"{name} of the decoder is {given}; expected {expected} for this model: use one of the same patch "
                    "size, channels and width as in the file, or a file without a decoder"
                )
        self.decoder.load_state_dict({name: tensor.float() for name, tensor in found.items()})
        return f"the decoder, {format_count(depth, 'block')} of width {width} with {format_count(heads, 'head')}"

    def list_compiled_modules(self) -> list[nn.Module]:
        return [*self.backbone.blocks, *self.decoder.decoder_blocks]  # the backbone itself is not called

    @torch.no_grad()
    def reconstruct(self, images: Tensor, keys: NDArray[np.uint64] | None = None) -> Reconstruction:
        """Predict the hidden patches of images, uint8 (B, C, H, W); masks are drawn by the keys, by default 0, 1, …

        Predicted pixels that are normalized per patch get the mean and variance of the patch in the image.
        """
        assert self.preprocessing is not None, "called before `setup`"
        inputs = self.normalize(images)
        keys = np.arange(len(images), dtype=np.uint64) if keys is None else keys
        kept, hidden = self.draw_masks(keys, inputs.device)
        with temporary_eval_mode(self):
            predicted = self.decoder(self.encode(inputs, kept), kept, hidden).float()
        pixels = split_into_patches(inputs, self.patch)
        if self.settings.normalize_pixels:
            mean, std = compute_patch_statistics(take_patches(pixels, hidden))
            predicted = predicted * std + mean
        pasted = pixels.scatter(1, hidden[..., None].expand_as(predicted), predicted)
        masks = torch.zeros_like(pixels).scatter(1, hidden[..., None].expand_as(predicted), 1.0)
        pasted, masks = (join_patches(each, self.patch, self.grid) for each in (pasted, masks))
        return make_reconstruction(inputs, pasted, masks[:, 0] > 0, self.preprocessing)

    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:
        batch = self.load_figure_images(source, device)
        if not batch.size:
            return []
        what = ", with the mean and variance of each patch in the image" if self.settings.normalize_pixels else ""
        caption = (
            f"Images, their {self.kept} visible patches of {self.patches}, the predicted pixels of the others{what}, "
            "and the absolute error, from black to its largest value."
        )
        return [make_reconstruction_figure(self.reconstruct(batch["images"]), caption)]


def check_encoder(model: ImageModel) -> None:
    """The decoder reads tokens after the final norm; layers that only pool tokens would not be trained."""
    if isinstance(model.get_submodule(model.final_norm), nn.Identity):
        raise ConfigError(
            "MAE reads the tokens after the final norm, and this model has none before it pools them (pool "
            "'mean_norm'); use `pool` mean or class"
        )
    if model.attention_pool:
        raise ConfigError("MAE does not train the layers of pool 'map'; use `pool` mean or class")


def compute_baseline(targets: Tensor, ranks: Ranks, *, centered: bool) -> Tensor:
    """The loss of the best constant prediction, the mean patch of all processes, which is 0 if patches are `centered`.

    With normalized pixels it is (n − 1)/n for patches of n numbers, less if some are uniform.
    """
    mean = targets.new_zeros(()) if centered else ranks.all_reduce_sum(targets.mean((0, 1))) / ranks.world_size
    return ranks.all_reduce_sum((targets - mean).square().mean()) / ranks.world_size


def build_mae(request: Request, context: BuildContext) -> TaskSetup:
    settings = parse_task_settings(TASK, request.recipe)

    def make_task(model: ImageModel) -> MaskedAutoencoder:
        if request.init is None:
            draw_authors_weights(model)
        return MaskedAutoencoder(model, settings)

    return build_pretraining(request, context, make_task)


@torch.no_grad()
def draw_authors_weights(model: ImageModel) -> None:
    """Initialize a new backbone as the authors do; norms, positions and other tokens stay as they are."""
    draw_xavier_weights(model)
    token = dict(model.named_parameters()).get("cls_token")
    if token is not None:
        nn.init.normal_(token, std=0.02)


TASK = TaskKind(name="mae", settings=MaeSettings, build=build_mae, needs_classes=False)
