"""Compact Convolutional Transformer (Hassani 2021, arXiv 2104.05704): convolutions make the tokens, for small data.

B batch, n = h·w tokens, D width, H heads, K width of a head; no class token, tokens are pooled by learned weights.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, join_masks
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid, sinusoid_1d
from vitrail.models.base.checkpoint_side import CheckpointSide
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, check_grid, check_heads, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import PatchEncoder, make_encoder_blocks, make_head, zero_head

NEIGHBOR_OFFSETS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))  # rows, columns


@dataclass(frozen=True, kw_only=True)
class CCTConfig:
    image_size: Size = 32  # rows, columns; one number for a square
    stem: tuple[int, ...] = (64,)  # channels of the tokenizer's convolutions but the last, which has `width`
    kernel: int = 3  # of each convolution
    stride: int = 1
    pools: int | tuple[int, ...] | None = None  # how many convolutions have a max pool, or which: (2, 4); default: all
    batch_norm: bool = False  # after each convolution
    channels: int = 3
    classes: int = field(default=10, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    width: int = 256  # channels of a token
    depth: int = 7  # blocks
    heads: int = 4  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 2·width
    published: bool = True  # no qkv bias, the MLP is added to the normalized tokens; otherwise as in a ViT
    neighbors: bool = False  # attention with a learned bias per offset; initially each head attends to one neighbor
    learned_positions: bool = True  # otherwise sinusoidal
    norm_eps: float = 1e-5
    dropout: float = field(default=0.0, metadata=RATE)
    attention_dropout: float = field(default=0.0, metadata=RATE)  # 0.1 in the paper
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # of the last block, 0 at the first; 0.1 in the paper
    dynamic: bool = False  # accept any multiple of the stride at run time; the table is resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)
        convolutions = len(self.stem) + 1
        if self.kernel % 2 == 0:
            raise ConfigError(f"kernel {self.kernel}; expected an odd number")
        if not set(self.pooled) <= set(range(1, convolutions + 1)) or len(set(self.pooled)) < len(self.pooled):
            raise ConfigError(f"pools {self.pools}; expected at most {convolutions}, each after another convolution")
        if self.neighbors and self.attention_dropout:
            raise ConfigError("attention_dropout and neighbors are both set; expected at most one of them")
        check_grid(pair(self.image_size), self.patch)

    @property
    def pooled(self) -> tuple[int, ...]:
        """The convolutions that are followed by a max pool; the first one is 1."""
        pools = len(self.stem) + 1 if self.pools is None else self.pools
        return tuple(range(1, pools + 1)) if isinstance(pools, int) else pools

    @property
    def patch(self) -> tuple[int, int]:
        """Pixels per token."""
        side = self.stride ** (len(self.stem) + 1) * 2 ** len(self.pooled)
        return (side, side)


class CCT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: CCTConfig
    attention_pool, first_filters = "attn_pool", "patch_embed.layers.0.weight"
    whitens = True
    no_masking_reason = "its convolutions mix patches before they become tokens"

    def __init__(self, config: CCTConfig) -> None:
        super().__init__(config)
        width, mlp_width = config.width, config.mlp_width or 2 * config.width
        self.declare_level(config.patch)
        self.classifiers = (("map", "head"),) if config.classes else ()
        if config.neighbors:
            self.no_dropping_reason = "its attention needs the offset between any two tokens"
        widths = (config.channels, *config.stem, width)
        self.patch_embed = Tokenizer(widths, config)
        self.pos_embed = nn.Parameter(torch.empty(1, math.prod(self.grid), width), config.learned_positions)
        self.pos_drop = nn.Dropout(config.dropout)
        kind, eps, bias = PublishedBlock if config.published else Block, config.norm_eps, not config.published
        self.blocks = make_encoder_blocks(config, mlp_width, kind=kind, qkv_bias=bias)
        if config.neighbors:
            for block in self.blocks:
                block.attn = LocalAttention(width, config.heads, self.grid, bias=bias)
        self.norm = nn.LayerNorm(width, eps)
        self.attn_pool = SequencePool(width, 1)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """Linear maps as in a ViT, convolutions scaled for the ReLU after them; the head is zero."""
        init_layers(self)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, LocalAttention):
                module.init_neighbor_offsets()
        if self.config.learned_positions:
            nn.init.normal_(self.pos_embed, std=0.02)
        else:
            self.pos_embed.copy_(sinusoid_1d(self.grid, self.config.width))
        zero_head(self.head)

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the pooled `tokens`: (B, n, D) → (B, classes)."""
        return self.head(self.attn_pool(tokens))

    def whiten(self, batches: Iterable[Tensor]) -> None:
        self.patch_embed.whiten(batches)


class Tokenizer(nn.Module):
    """Convolutions, each with ReLU and optional max pool: (B, C, H, W) → (B, n, D)."""

    def __init__(self, widths: tuple[int, ...], config: CCTConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for layer, (width, out_width) in enumerate(pairwise(widths), 1):
            layers.append(nn.Conv2d(width, out_width, config.kernel, config.stride, config.kernel // 2, bias=False))
            if config.batch_norm:
                layers.append(nn.BatchNorm2d(out_width))
            layers.append(nn.ReLU())
            if layer in config.pooled:
                layers.append(nn.MaxPool2d(3, 2, 1))
        self.layers = nn.Sequential(*layers)

    @torch.no_grad()
    def whiten(self, batches: Iterable[Tensor]) -> None:
        """Set the first filters to ± the principal components of image patches, with outputs of variance 1."""
        weight = self.layers[0].get_parameter("weight")  # (out, C, P, P)
        products, count = torch.zeros(2 * (weight[0].numel(),)), 0
        for images in batches:
            patches = F.unfold(images, weight.shape[2:]).transpose(1, 2).flatten(0, 1)  # (B·n, C·P·P)
            products, count = products + patches.T @ patches, count + len(patches)
        variances, patterns = torch.linalg.eigh(products / count)
        filters = (patterns / (variances + 5e-4).sqrt()).T.flip(0)[: len(weight) // 2].unflatten(1, weight.shape[1:])
        weight[: 2 * len(filters)] = torch.cat([filters, -filters])

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)  # up to 1.5 × faster on a CPU
        return self.layers(images).flatten(2).transpose(1, 2)


class SequencePool(nn.Linear):
    """Weighted mean of the tokens, with weights computed from each token: (B, n, D) → (B, D)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        return (self.weights(input)[:, 0] @ input)[:, 0]

    def weights(self, tokens: Tensor) -> Tensor:
        """The weights as attention of one head and one query: (B, 1, 1, n)."""
        return super().forward(tokens).softmax(1).transpose(1, 2)[:, None]


class PublishedBlock(Block):
    """The MLP gets the normalized tokens and is added to them, not to the residual stream."""

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        x = x[:, :queries] + self.drop_path(self.drop(self.attn(self.norm1(x), grid, mask, queries)))
        x = self.norm2(x)
        return x + self.drop_path(self.mlp(x))


class LocalAttention(SelfAttention):
    """Self-attention with a learned bias per head and offset, initialized as a convolution (d'Ascoli 2021)."""

    def __init__(self, width: int, heads: int, grid: Grid, *, bias: bool) -> None:
        super().__init__(width, heads, bias=bias)
        self.grid = grid
        self.offsets = nn.Parameter(torch.empty(heads, 2 * grid[0] - 1, 2 * grid[1] - 1))

    def init_neighbor_offsets(self) -> None:
        """Point each head at one of the 8 neighbors: minus the squared distance from it, at least −8."""
        rows, columns = (torch.arange(1 - n, n, device=self.offsets.device) for n in self.grid)
        for head, (row, column) in zip(self.offsets, NEIGHBOR_OFFSETS * len(self.offsets), strict=False):
            head.data.copy_(-((rows[:, None] - row) ** 2 + (columns - column) ** 2).clamp(max=8))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        q, k, v, mask = super().project(x, grid, mask, queries)
        h, w = grid or self.grid
        rows, columns = (
            (torch.arange(n, device=x.device) - torch.arange(n, device=x.device)[:, None]).clamp(1 - m, m - 1) + m - 1
            for n, m in zip((h, w), self.grid, strict=True)
        )  # from each query to each key, clamped to the largest offset in training
        by_offset = self.offsets[:, rows[:, None, :, None], columns[:, None, :]].reshape(-1, h * w, h * w)
        return q, k, v, join_masks(by_offset[:, :queries], mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)  # (B, H, n, n)
        scores = scores if mask is None else scores + mask.to(scores.dtype)  # a fused kernel takes a third longer
        return scores.softmax(-1) @ v


SMALL = CCTConfig(width=128, heads=2, mlp_width=128)
LARGE = CCTConfig(kernel=7, stride=2, width=384, depth=14, heads=6, mlp_width=1152, image_size=224, classes=1000)
CPU = CCTConfig(stem=(48, 96), pools=2, batch_norm=True, width=128, depth=4, heads=8, published=False, neighbors=True)
PRESETS = Presets(
    lambda: {  # cct_depth_kernel×convolutions_pixels
        "cct_2_3x2_32": replace(SMALL, depth=2),
        "cct_4_3x2_32": replace(SMALL, depth=4),
        "cct_6_3x1_32": CCTConfig(stem=(), depth=6),
        "cct_7_3x1_32": CCTConfig(stem=()),
        "cct_7_3x2_32": CCTConfig(),
        "cct_14_7x2_224": LARGE,
        "cct_14_7x2_384": replace(LARGE, image_size=384),
        "cct_cpu_32": replace(CPU, dynamic=True),  # ours: 0.7 M parameters, trains in half an hour on two cores
    }
)
CHECKPOINT = CheckpointSide(resampled={"pos_embed": "grid"})  # `offsets` has another shape than in a ViT
FAMILY = Family("cct", CCTConfig, CCT, PRESETS, checkpoint=CHECKPOINT)
