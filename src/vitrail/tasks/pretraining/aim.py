"""Autoregressive image models (AIM, El-Nouby 2024, arXiv 2401.08541): predict each patch from the patches before it.

B batch, n patches in the order of rows, m predicted ones, P×Q patch, C channels, D width.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.layers.attention import causal_mask
from vitrail.layers.block import Mlp
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.init import init_layers
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import AimSettings
from vitrail.tasks.image_task import check_image_source
from vitrail.tasks.metric import LOSS_METRIC
from vitrail.tasks.pretraining.parts.masked_prediction import (
    compute_patch_statistics,
    draw_noise,
    join_patches,
    normalize_patches,
    split_into_patches,
)
from vitrail.tasks.pretraining.parts.pretraining_figures import plot_image_rows, to_pixels
from vitrail.tasks.pretraining.pretraining import (
    KNN_METRIC,
    RANK_METRIC,
    SPREAD_METRIC,
    Pretraining,
    make_pretraining_kind,
    make_relative_loss_metric,
)
from vitrail.tasks.task import Source

RELATIVE_LOSS_METRIC = make_relative_loss_metric("the mean patch")


class PredictionHead(nn.Module):
    """Residual MLPs on each token, then one linear map to pixels: (B, N, D) → (B, N, P·Q·C)."""

    def __init__(self, tokens: int, pixels: int, *, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(tokens, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, 1e-6) for _ in range(depth))
        self.mlps = nn.ModuleList(Mlp(width, 4 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, 1e-6)
        self.out = nn.Linear(width, pixels)
        init_layers(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.out(self.norm(x))


class AutoregressiveImageModel(Pretraining):
    """The backbone attends to earlier patches only; a head, which is not saved with it, predicts the next patch.

    With prefix attention, the patches of a random first part attend to each other, and only the others are predicted:
    then the backbone can be used with attention to all patches. The loss is the mean over the predicted patches of an
    image, then over the images; in the paper it is the mean over all predicted patches.
    """

    metrics = (LOSS_METRIC, RELATIVE_LOSS_METRIC, KNN_METRIC, SPREAD_METRIC, RANK_METRIC)

    def __init__(self, backbone: ImageModel, settings: AimSettings | None = None) -> None:
        super().__init__()
        self.backbone, self.settings = backbone, settings or AimSettings()
        self.patch, self.patches = backbone.levels[-1].stride, backbone.grid[0] * backbone.grid[1]
        pixels = self.patch[0] * self.patch[1] * backbone.config.channels
        width, depth = self.settings.head_width, self.settings.head_depth
        self.head = PredictionHead(backbone.levels[-1].width, pixels, width=width, depth=depth)

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        model, kind = self.backbone, type(self.backbone).__name__
        if not model.takes_mask:
            raise ConfigError(
                f"AIM needs attention to earlier patches only, which this {kind} does not have; use a plain ViT"
            )
        if model.prefix:
            raise ConfigError(
                f"this {kind} has {', '.join(model.prefix_tokens[:2])} tokens before the patches, which AIM would not "
                "train; use `fields` class_token=false pool=mean, and no registers"
            )
        if isinstance(model.get_submodule(model.final_norm), nn.Identity) or model.attention_pool:
            raise ConfigError("AIM trains the final norm and no layers that pool the patches; use `fields` pool=mean")
        if self.patches < 2:
            raise ConfigError("one patch per image; expected at least 2, so that the next can be predicted")
        super().check(source, recipe, ranks)

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        images = self.normalize(batch["images"])
        prefixes = self.draw_prefixes(batch.keys["images"]).to(images.device)
        tokens = self.encode(images, prefixes)
        targets = split_into_patches(images, self.patch)[:, 1:]
        targets = normalize_patches(targets) if self.settings.normalize_pixels else targets
        shares = share_predicted_patches(prefixes, self.patches)
        loss = ((self.head(tokens[:, :-1]).float() - targets).square().mean(-1) * shares).sum(1).mean()
        with torch.no_grad():
            baseline = self.compute_baseline(targets, shares, self.compared_ranks)
            spread = self.measure_spread(tokens.mean(1))
        return loss, {"relative_loss": loss.detach() / baseline, "baseline_loss": baseline, "spread": spread}

    def draw_prefixes(self, keys: NDArray[np.uint64]) -> Tensor:
        """The number of patches of each image that attend to each other, from 1 to n − 1: (B,) → (B,)."""
        if not self.settings.prefix_attention:
            return torch.ones(len(keys), dtype=torch.int64)
        return 1 + torch.from_numpy((draw_noise(keys, 1)[:, 0] * (self.patches - 1)).astype(np.int64))

    def encode(self, images: Tensor, prefixes: Tensor) -> Tensor:
        """The tokens after the final norm, each a function of its prefix and the patches up to its own: (B, n, D)."""
        x, grid = self.backbone.embed(images)
        mask = causal_mask(self.patches, self.patches, x.device)
        if self.settings.prefix_attention:
            inside = torch.arange(self.patches, device=x.device) < prefixes[:, None]  # keys
            mask = mask | inside[:, None, None]  # (B, 1, n, n)
        return self.backbone.get_submodule(self.backbone.final_norm)(self.backbone.run(x, grid, mask=mask))

    def compute_baseline(self, targets: Tensor, shares: Tensor, ranks: Ranks) -> Tensor:
        """The loss of the best constant prediction, the mean patch of all processes, which is 0 if normalized."""
        mean = targets.new_zeros(())
        if not self.settings.normalize_pixels:
            mean = (targets * shares[..., None]).sum(1).mean(0)
            mean = ranks.all_reduce_sum(mean) / ranks.world_size
        loss = ((targets - mean).square().mean(-1) * shares).sum(1).mean()
        return ranks.all_reduce_sum(loss) / ranks.world_size

    def list_compiled_modules(self) -> list[nn.Module]:
        return [*self.backbone.blocks]  # the backbone itself is not called

    @torch.no_grad()
    def predict_patches(self, images: Tensor) -> Tensor:
        """Each patch, but the first, predicted from those before it in model input: (B, C, H, W) → (B, n − 1, P·Q·C).

        Predicted pixels that are normalized get the mean and variance of the patch in the image.
        """
        ones = torch.ones(len(images), dtype=torch.int64, device=images.device)
        with temporary_eval_mode(self):
            predicted = self.head(self.encode(images, ones)[:, :-1]).float()
        if self.settings.normalize_pixels:
            mean, std = compute_patch_statistics(split_into_patches(images, self.patch)[:, 1:])
            predicted = predicted * std + mean
        return predicted

    def draw_figures(self, source: Source, device: torch.device) -> list[CaptionedFigure]:
        batch = self.load_figure_images(source, device)
        if not batch.size:
            return []
        inputs, prepared = self.normalize(batch["images"]), check_image_source(source, self).preprocessing
        predicted = self.predict_patches(inputs)
        gray = torch.zeros_like(predicted[:, :1])  # the mean color: there is nothing to predict the first patch from
        shown = {
            "images": inputs,
            "predicted": join_patches(torch.cat([gray, predicted], 1), self.patch, self.backbone.grid),
        }
        arrays = {name: to_pixels(each, prepared) for name, each in shown.items()}
        what = ", with the mean and variance of each patch in the image" if self.settings.normalize_pixels else ""
        return [
            plot_image_rows(
                name="next_patches",
                title="Patches predicted from those before",
                caption=f"Images, and each of their {self.patches} patches predicted from those before it{what}.",
                rows=dict(zip(("image", "prediction"), arrays.values(), strict=True)),
                arrays=arrays,
            )
        ]


def share_predicted_patches(prefixes: Tensor, patches: int) -> Tensor:
    """The weights in the loss of patches 1, 2, …: 0 in the prefix, equal for the others of an image: (B, n − 1)."""
    predicted = (torch.arange(1, patches, device=prefixes.device) >= prefixes[:, None]).float()
    return predicted / predicted.sum(1, keepdim=True)


TASK = make_pretraining_kind("aim", AimSettings, AutoregressiveImageModel)
