"""Parallel ViT (Touvron 2022, arXiv 2203.09795): a wider and less deep ViT, whose blocks run in pairs side by side.

x += Σ attention branches, then x += Σ MLP branches; each branch has its own norm and LayerScale.
B batch, n = h·w patches, N = 1 + n tokens, D width, R branches, H heads of a branch, K width of a head.
"""

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.layers.attention import AttentionLayer, Mask, SelfAttention
from vitrail.layers.block import LayerScale, Mlp, StochasticDepth
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import RATE, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_as_deit
from vitrail.models.names import encoder_names
from vitrail.models.parts.encoder import EncoderConfig, PatchEncoder, make_head, zero_head

Rates = tuple[float, float]  # dropout, stochastic depth


@dataclass(frozen=True, kw_only=True)
class ParallelViTConfig(EncoderConfig):
    depth: int = 18  # blocks
    branches: int = 2  # of attention, and of MLPs, in each block; heads and mlp_width are those of a branch
    layer_scale: float | None = 1e-5  # the factor that a branch starts with, 1e-4 for the authors; none: no factor
    prefix_positions: bool = True  # whether the class token has a position; for the authors it has none
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # of every branch


class ParallelViT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: ParallelViTConfig
    prefix_tokens = classifier_tokens = ("class",)
    first_filters = "patch_embed.proj.weight"

    def __init__(self, config: ParallelViTConfig) -> None:
        super().__init__(config)
        width, patch = config.width, pair(config.patch_size)
        self.declare_level(patch)
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, math.prod(self.grid) + config.prefix_positions, width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            ParallelBlock(
                width,
                config.heads,
                config.mlp_width or 4 * width,
                config.branches,
                norm_eps=config.norm_eps,
                layer_scale=config.layer_scale,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                stochastic_depth=config.stochastic_depth,
            )
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in DeiT's code, which the authors' is based on; the head is zero."""
        init_as_deit(self, self.cls_token, self.pos_embed)
        zero_head(self.head)

    def tables(self, grid: Grid) -> Tensor:
        table = resample(self.pos_embed, self.grid, grid)
        return F.pad(table, (0, 0, 1 - int(self.config.prefix_positions), 0))  # zeros for the class token


class ParallelBlock(nn.Module):
    """x += Σ attention(LN(x)); x += Σ MLP(LN(x)): (B, N, D) → (B, N, D), or only the first `queries` tokens of it."""

    recompute = False  # set on a block: trades time for memory, activations are computed again in the backward pass

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        branches: int,
        *,
        norm_eps: float,
        layer_scale: float | None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        rates = (dropout, stochastic_depth)
        self.attns = ParallelAttention(
            [AttentionBranch(width, heads, norm_eps, layer_scale, rates, attention_dropout) for _ in range(branches)]
        )
        self.ffns = nn.ModuleList(MlpBranch(width, mlp_width, norm_eps, layer_scale, rates) for _ in range(branches))

    def forward(self, x: Tensor, grid: Grid | None = None, queries: int | None = None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, grid, queries, use_reentrant=False)
        return self.compute(x, grid, queries)

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None) -> Tensor:
        x = x[:, :queries] + self.attns(x, grid, queries=queries)
        return reduce(torch.add, [branch(x) for branch in self.ffns], x)


class MlpBranch(nn.Module):
    """γ·MLP(LN(x)): (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, mlp_width: int, norm_eps: float, layer_scale: float | None, rates: Rates) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, norm_eps)
        self.mlp = Mlp(width, mlp_width, dropout=rates[0])
        self.ls = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path = StochasticDepth(rates[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.ls(self.mlp(self.norm(x))))


class AttentionBranch(nn.Module):
    """γ·attention(LN(x)), in two steps: q, k and v from the tokens, and what the outputs of its heads add to them."""

    def __init__(
        self, width: int, heads: int, norm_eps: float, layer_scale: float | None, rates: Rates, attention_dropout: float
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, norm_eps)
        self.attn = BranchAttention(width, heads, dropout=attention_dropout)
        self.drop = nn.Dropout(rates[0])
        self.ls = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path = StochasticDepth(rates[1])

    def project(self, x: Tensor, queries: int | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.attn.project(self.norm(x), queries=queries)[:3]

    def forward(self, outputs: Tensor) -> Tensor:
        return self.drop_path(self.ls(self.drop(self.attn.proj(outputs))))


class BranchAttention(SelfAttention):
    """A part of `ParallelAttention`, which computes the heads of all branches together."""


class ParallelAttention(AttentionLayer):
    """The sum of several attention branches, computed as one attention with the heads of all: (B, N, D) → (B, N, D).

    So it is one layer to look at: rollout averages over the heads of all branches, and does not multiply branches.
    """

    def __init__(self, branches: list[AttentionBranch]) -> None:
        super().__init__()
        self.heads, self.dropout = sum(branch.attn.heads for branch in branches), branches[0].attn.dropout
        for number, branch in enumerate(branches):
            self.add_module(str(number), branch)
        self.proj = nn.Identity()  # each branch has its own

    @property
    def branches(self) -> list[AttentionBranch]:
        return [part for part in self.children() if isinstance(part, AttentionBranch)]

    def project(
        self,
        x: Tensor,
        grid: Grid | None = None,  # noqa: ARG002  # there are no positions in the attention
        mask: Tensor | None = None,
        queries: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parts = zip(*(branch.project(x, queries) for branch in self.branches), strict=True)
        q, k, v = (torch.cat(part, dim=1) for part in parts)  # (B, R·H, N, K)
        return q, k, v, mask

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        outputs = super().forward(x, grid, mask, queries).chunk(len(self.branches), dim=-1)  # R of (B, N, D)
        return reduce(torch.add, [branch(part) for branch, part in zip(self.branches, outputs, strict=True)])


SIZES = {"small": ParallelViTConfig(width=384, heads=6), "base": ParallelViTConfig()}
PRESETS = Presets(
    lambda: {
        **{f"vit_{size}_patch16_18x2_224": SIZES[size] for size in SIZES},  # timm
        **{
            f"deit_{size}_patch16_18x2{suffix}": replace(SIZES[size], layer_scale=scale, prefix_positions=False)
            for size in SIZES
            for suffix, scale in {"": None, "_LS": 1e-4}.items()
        },  # the authors
    }
)
ALIASES = {"ViT-S18x2": "vit_small_patch16_18x2_224", "ViT-B18x2": "vit_base_patch16_18x2_224"}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    width, channels, *patch = side.get_shape(shapes, encoder_names.PATCH_KERNEL, 4)
    hidden = side.get_shape(shapes, "blocks.0.ffns.0.mlp.fc1.weight", 2)[0]
    scaled = "blocks.0.attns.0.ls.gamma" in shapes
    fields = {
        "patch_size": (patch[0], patch[1]),
        "channels": channels,
        "classes": side.count_classes(shapes, "head.weight"),
        "width": width,
        "depth": side.count_numbers(shapes, r"blocks\.(\d+)\."),
        "branches": side.count_numbers(shapes, r"blocks\.0\.attns\.(\d+)\."),
        "mlp_width": None if hidden == 4 * width else hidden,
        "layer_scale": encoder_names.DEFAULT_LAYER_SCALE if scaled else None,
    }
    return side.InferredConfig(fields=fields, stride=(patch[0], patch[1]), prefix=1)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = encoder_names.make_timm_arguments(config) | {"no_embed_class": not config["prefix_positions"]}
    return encoder_names.make_timm_card(config, "vit_small_patch16_18x2_224", arguments)


TIMM_TABLE = """
    {cls_token,pos_embed,patch_embed.proj.*,norm.*,head.*}
    blocks.#.attns.#.{norm.*,attn.qkv.*,attn.proj.*,ls.gamma}
    blocks.#.ffns.#.{norm.*,mlp.fc1.*,mlp.fc2.*,ls.gamma}
"""
# names of the second branch end with 1
AUTHORS_TABLE = """
    {cls_token,pos_embed,patch_embed.proj.*,norm.*,head.*}
    blocks.#.:
        norm1{,1}.* -> attns.{0,1}.norm.*
        attn{,1}.{qkv,proj}.* -> attns.{0,1}.attn.{qkv,proj}.*
        gamma_1{,_1} -> attns.{0,1}.ls.gamma
        norm2{,1}.* -> ffns.{0,1}.norm.*
        mlp{,1}.{fc1,fc2}.* -> ffns.{0,1}.mlp.{fc1,fc2}.*
        gamma_2{,_1} -> ffns.{0,1}.ls.gamma
"""
TIMM = replace(
    encoder_names.TIMM,
    table=side.parse_table(TIMM_TABLE),
    markers=(encoder_names.PATCH_KERNEL, "blocks.0.attns.0.norm.weight"),
    supported={"branches": (2,)},
    card=make_timm_card,
    details={**encoder_names.TIMM_DETAILS, "only_in_timm": True},
)
AUTHORS = side.SourceNames(
    layout="deit",
    table=side.parse_table(AUTHORS_TABLE),
    markers=(encoder_names.PATCH_KERNEL, "blocks.0.norm11.weight"),
    supported={"branches": (2,), "prefix_positions": (False,)},
    assumed=encoder_names.TIMM_ASSUMED,
    heads={384: 6, 768: 12},
    details={"fields": {"prefix_positions": False}, "own_names": True},
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=(TIMM, AUTHORS))
FAMILY = Family("parallel_vit", ParallelViTConfig, ParallelViT, PRESETS, ALIASES, CHECKPOINT)
