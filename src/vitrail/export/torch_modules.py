"""Modules for exports: what is exported, which takes pixels as Pillow gives them, and an exported model in its place.

B batch, N tokens, D width, H heads, C channels, P×Q patch, n patches.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.description import OutputKind
from vitrail.export.exported_model import ExportedModel
from vitrail.layers.attention import SelfAttention
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import Size, find_image_config
from vitrail.models.base.contract import find_image_model, unwrap_compiled
from vitrail.models.parts.token_merging import MergingBlocks


class ExportModule(nn.Module):
    """(B, rows, columns, C) pixels from 0 to 255 → logits (B, classes), or features (B, D), or all tokens (B, N, D).

    The output maps is the feature maps of all levels, one after another, as a vector per image.
    The given model is copied. With `fused`, attention is an operator of ONNX Runtime, which torch cannot run.
    """

    def __init__(
        self, model: nn.Module, preprocessing: Preprocessing, output: OutputKind = "logits", *, fused: bool
    ) -> None:
        super().__init__()
        check_output_available(model, output)
        self.output: OutputKind = output
        self.preprocessing = preprocessing
        self.model: Any = deepcopy(unwrap_compiled(model)).eval().float().requires_grad_(False)
        stem = find_first_patch_embed(self.model)
        self.folds_normalization = stem is not None  # a padded stem would pad with 0, not the mean color
        if stem is not None:
            self.model.set_submodule(stem, PixelPatchEmbed(self.model.get_submodule(stem), preprocessing))
        merges = any(isinstance(module, MergingBlocks) for module in self.model.modules())  # merging needs the keys
        if fused and not merges:
            for name, module in [*self.model.named_modules()]:
                if type(module) is SelfAttention and module.positions is None:
                    self.model.set_submodule(name, FusedAttention(module))
        self.register_buffer("mean", torch.tensor(preprocessing.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(preprocessing.std)[:, None, None])

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.float().permute(0, 3, 1, 2)
        if not self.folds_normalization:
            images = (images / 255 - self.get_buffer("mean")) / self.get_buffer("std")
        return compute_logits_or_features(self.model, images, self.output)


def find_first_patch_embed(model: nn.Module) -> str | None:
    """The name of the model's first layer if it is a PatchEmbed."""
    declared = find_image_model(model)
    if declared is None:
        return None
    stems = (name for name, part in declared.named_modules() if type(part) is PatchEmbed)
    return next((name for name in stems if declared.first_filters == f"{name}.proj.weight"), None)


def make_channel_tensors(preprocessing: Preprocessing, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Mean and std, each (C, 1, 1)."""
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (preprocessing.mean, preprocessing.std))
    return mean, std


def normalize_uint8_batch(pixels: NDArray[np.uint8], mean: Tensor, std: Tensor) -> Tensor:
    """Pixels from 0 to 255 as Pillow gives them, (B, rows, columns, C) → the model's input (B, C, rows, columns)."""
    images = torch.from_numpy(pixels).to(mean.device).permute(0, 3, 1, 2).float()
    return (images / 255 - mean) / std


def compute_logits_or_features(model: Any, images: Tensor, output: OutputKind) -> Tensor:
    """The logits of a model, or its features after the final norm, or its feature maps as one vector per image."""
    if output == "logits":
        return model(images)
    if output == "maps":
        return torch.cat([each.flatten(1) for each in model.feature_maps(images)], dim=1)
    if output == "class":
        return model.encode(images, queries=1)[:, 0]
    tokens = model.tokens(images)
    return tokens if output == "tokens" else tokens[:, model.prefix :].mean(1)


def check_output_available(model: nn.Module, output: OutputKind) -> None:
    if output == "logits":
        config = find_image_config(model)
        if not (getattr(model, "num_classes", 0) if config is None else config.classes):  # the name in timm
            raise ConfigError(
                "the model has no head; expected one with classes: `vitrail train` with it as `init` adds one"
            )
        return
    declared = find_image_model(model)
    if declared is None:
        raise ConfigError(f"{type(model).__name__} has no tokens; features need a model of vitrail's families")
    if output == "maps":
        return
    if declared.no_tokens_reason:
        kind = type(declared).__name__
        raise ConfigError(f"features {output!r} of a {kind}: {declared.no_tokens_reason}; expected its logits or maps")
    if output == "class" and "class" not in declared.prefix_tokens:
        raise ConfigError("features 'class' of a model without a class token; use mean or tokens")


class PixelPatchEmbed(nn.Module):
    """`PatchEmbed` after normalization, computed from pixels from 0 to 255: (B, C, H, W) → (B, n, D).

    W·((x/255 − mean)/std) + b = (W/(255·std))·x + (b − Σ W·mean/std).
    """

    def __init__(self, embed: PatchEmbed, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.patch = embed.patch
        weight = embed.proj.weight.detach().double()  # (D, C, P, Q)
        mean, std = (torch.tensor(each).double()[:, None, None] for each in (preprocessing.mean, preprocessing.std))
        shift = (weight * mean / std).sum((1, 2, 3))
        bias = -shift if embed.proj.bias is None else embed.proj.bias.detach().double() - shift
        self.register_buffer("weight", (weight / (255 * std)).permute(2, 3, 1, 0).flatten(0, 2).float())  # (P·Q·C, D)
        self.register_buffer("bias", bias.float())

    def forward(self, images: Tensor) -> Tensor:
        b, c, h, w = images.shape
        p, q = self.patch
        patches = images.permute(0, 2, 3, 1).reshape(b, h // p, p, w // q, q, c).transpose(2, 3)
        return patches.reshape(b, (h // p) * (w // q), p * q * c) @ self.get_buffer("weight") + self.get_buffer("bias")


class FusedAttention(nn.Module):
    """`SelfAttention` as one operator, which splits the heads without copies: (B, N, D) → (B, N, D)."""

    def __init__(self, inner: SelfAttention) -> None:
        super().__init__()
        self.heads, self.proj = inner.heads, inner.proj
        for name, weight in zip(("q", "k", "v"), inner.qkv.weight.detach().chunk(3), strict=True):
            self.register_buffer(name, weight.clone())
        bias = inner.qkv.bias
        self.register_buffer("bias", torch.zeros(len(inner.qkv.weight)) if bias is None else bias.detach().clone())

    def forward(
        self,
        x: Tensor,
        grid: Grid | None = None,  # noqa: ARG002  # it has no positions in the attention
        mask: Tensor | None = None,
        queries: int | None = None,
    ) -> Tensor:
        assert mask is None, "only models without masks are fused"
        queried = x if queries is None else x[:, :queries]
        q, k, v = (F.linear(rows, self.get_buffer(name)) for rows, name in ((queried, "q"), (x, "k"), (x, "v")))
        mixed = torch.onnx.ops.symbolic(  # an operator of ONNX Runtime, which torch cannot compute
            "com.microsoft::MultiHeadAttention",
            (q, k, v, self.get_buffer("bias")),
            {"num_heads": self.heads},
            dtype=q.dtype,
            shape=q.shape,
            version=1,
        )
        return self.proj(mixed)


@dataclass(frozen=True, kw_only=True)
class ExportedConfig:
    """What evaluation needs to know, and the digest that tells exports apart."""

    image_size: Size
    channels: int
    classes: int
    precision: str
    digest: str


class ExportedModule(nn.Module):
    """Normalized images (B, C, rows, columns) → logits (B, classes), computed by ONNX Runtime without gradients."""

    def __init__(self, exported: ExportedModel) -> None:
        super().__init__()
        about = exported.description
        self.exported = exported
        self.config = ExportedConfig(
            image_size=about.preprocessing.image_size,
            channels=len(about.preprocessing.mean),
            classes=about.classes,
            precision=about.precision,
            digest=f"{about.digest} {sorted(about.files.items())}",
        )
        self.placeholder = nn.Parameter(torch.empty(0), requires_grad=False)  # tells device and dtype
        for name, values in (("mean", about.preprocessing.mean), ("std", about.preprocessing.std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # exact: float32 keeps (p/255 - mean)/std of a pixel p far closer to it than to its neighbors
        pixels = (images * self.get_buffer("std") + self.get_buffer("mean")).mul(255).round().clamp(0, 255)
        array = pixels.byte().permute(0, 2, 3, 1).contiguous().numpy(force=True)
        return torch.from_numpy(self.exported.run(array)).to(images.device)
