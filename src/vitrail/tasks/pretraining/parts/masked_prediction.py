"""Hidden patches: patches as rows of pixels, random masks, and what SimMIM and masked patch prediction share.

B images, C channels, P×Q patch, n = h·w patches row by row, K of them hidden, D width. A row has the order of MAE's
code: row, column, channel.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.data.rng import MASKING_PURPOSE, uniform_randoms
from vitrail.distributed import Ranks
from vitrail.layers.positions import Grid
from vitrail.models.base.contract import ImageModel
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.image_task import check_patches_can_be_masked
from vitrail.tasks.metric import LOSS_METRIC
from vitrail.tasks.pretraining.pretraining import (
    KNN_METRIC,
    RANK_METRIC,
    SPREAD_METRIC,
    Pretraining,
    make_relative_loss_metric,
)
from vitrail.tasks.task import Source

VARIANCE_EPSILON = 1e-6


def split_into_patches(images: Tensor, patch: Grid) -> Tensor:
    """(B, C, H, W) → (B, n, P·Q·C)."""
    b, c, h, w = images.shape
    p, q = patch
    return images.reshape(b, c, h // p, p, w // q, q).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def join_patches(pixels: Tensor, patch: Grid, grid: Grid) -> Tensor:
    """The inverse of `split_into_patches`: (B, n, P·Q·C) → (B, C, H, W)."""
    (rows, columns), (p, q) = grid, patch
    patches = pixels.unflatten(2, (p, q, -1)).unflatten(1, (rows, columns))  # (B, h, w, P, Q, C)
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def compute_patch_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of each patch, with the unbiased variance, as in MAE: (…, 1)."""
    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return mean, (variance + VARIANCE_EPSILON).sqrt()


def normalize_patches(pixels: Tensor) -> Tensor:
    """Each patch with mean 0 and variance 1, which MAE calls norm_pix: (…, P·Q·C)."""
    mean, std = compute_patch_statistics(pixels)
    return (pixels - mean) / std


def take_patches(patches: Tensor, indices: Tensor) -> Tensor:
    """The patches at the indices of each image: (B, n, D), (B, K) → (B, K, D)."""
    return patches.gather(1, indices[..., None].expand(-1, -1, patches.shape[-1]))


def draw_noise(keys: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of `count` patches or squares: (B,) → (B, count)."""
    return uniform_randoms(keys, count, MASKING_PURPOSE)


def split_by_noise(noise: NDArray[np.float64], kept: int) -> tuple[Tensor, Tensor]:
    """The indices of the `kept` smallest numbers of each row, and those of the others: (B, K), (B, n − K)."""
    order = torch.from_numpy(np.argsort(noise, axis=1, kind="stable"))
    return order[:, :kept], order[:, kept:]


def draw_mask(keys: NDArray[np.uint64], count: int, hidden: int) -> Tensor:
    """A mask that is True for exactly `hidden` of `count` patches or squares of each image: bool (B, count)."""
    chosen, _ = split_by_noise(draw_noise(keys, count), hidden)
    return torch.zeros(len(keys), count, dtype=torch.bool).scatter_(1, chosen, value=True)


RELATIVE_LOSS_METRIC = make_relative_loss_metric("the mean color")
BASELINE_IMAGES = 512  # training images that a trivial prediction is measured on


class MaskedPrediction(Pretraining):
    """A task that predicts hidden patches from their own output tokens."""

    method: ClassVar[str]  # its name in messages
    metrics = (LOSS_METRIC, RELATIVE_LOSS_METRIC, KNN_METRIC, SPREAD_METRIC, RANK_METRIC)
    backbone: Any

    @property
    def patch(self) -> Grid:
        return self.backbone.levels[-1].stride

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        check_patches_can_be_masked(self.method, self.backbone)
        check_tokens_are_read(self.method, self.backbone)
        super().check(source, recipe, ranks)

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        """The output tokens of the patches, given the input of the first block: (B, N, D) → (B, n, D)."""
        model = self.backbone
        return model.get_submodule(model.final_norm)(model.run(x, grid))[:, model.prefix :]

    def scale_pixels(self, images: Tensor) -> Tensor:
        """Pixels from 0 to 1, of uint8 or of normalized images."""
        if not images.is_floating_point():
            return images / 255
        assert self.preprocessing is not None, "called before `setup`"
        mean, std = (
            images.new_tensor(each).reshape(-1, 1, 1) for each in (self.preprocessing.mean, self.preprocessing.std)
        )
        return (images * std + mean).clamp(0, 1)

    def load_own_weights(self, tensors: Mapping[str, Tensor], other_names: Mapping[str, tuple[str, ...]]) -> str:
        """Load everything but the backbone, from a run or from a file where some weights have `other_names`."""
        own = {name: weight for name, weight in self.named_parameters() if not name.startswith("backbone.")}
        places = {name: (f"task.{name}", name, *other_names.get(name, ())) for name in own}
        found = {name: next((tensors[each] for each in places[name] if each in tensors), None) for name in own}
        complete = {name: value for name, value in found.items() if value is not None}
        if len(complete) < len(own):
            return ""
        for name, value in complete.items():
            if own[name].numel() != value.numel():
                raise CheckpointError(
                    f"{name} of {self.method} has the shape {tuple(value.shape)}; expected {tuple(own[name].shape)} "
                    "for this model and these settings; change them, or start from the model/ folder of the run"
                )
            own[name].data.copy_(value.reshape(own[name].shape))
        return ", ".join(own)

    def list_compiled_modules(self) -> list[nn.Module]:
        return [*self.backbone.blocks]  # the backbone itself is not called


def check_tokens_are_read(method: str, model: ImageModel) -> None:
    """Refuse models with layers after the tokens of the patches, which would not be trained."""
    if isinstance(model.get_submodule(model.final_norm), nn.Identity) or model.attention_pool:
        raise ConfigError(
            f"{method} trains the tokens of the patches, but not layers that pool them (pool 'mean_norm' or 'map'); "
            "use `pool` mean or class; fine-tuning can change it"
        )


def compute_mean_color_error(source: ImageSource, power: int, scale: Tensor | None = None) -> float:
    """The mean of |pixel − mean color of its image|^power over normalized training images, multiplied by `scale`."""
    total, count = 0.0, 0
    for images in source.load_evenly_spaced_images(BASELINE_IMAGES):
        scaled = images if scale is None else images * scale[:, None, None]
        errors = (scaled - scaled.mean((-2, -1), keepdim=True)).abs().pow(power)
        total, count = total + float(errors.double().sum()), count + errors.numel()
    return max(total / max(count, 1), 1e-12)  # all images may be of one color
