"""Vision Transformer (Dosovitskiy 2020, arXiv 2010.11929): an image is worth 16×16 words.

B batch, E prefix tokens (class, registers), n = h·w patches, N = E + n tokens, D width, L layers.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.block import Activation
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.pool import AttentionPool
from vitrail.layers.positions import Grid, join_axes, resample
from vitrail.models.base.checkpoint_side import CheckpointSide
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_patch_config, pair
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers, lecun_normal_
from vitrail.models.names.encoder_names import DINO_SWIGLU, FACEBOOK, TIMM, WRITTEN_AS_VIT, infer_vit_config
from vitrail.models.names.hf_names import HF_DINO, HF_REGISTER, HF_SIGLIP, HF_VIT
from vitrail.models.parts.encoder import (
    FIXED_TABLES,
    in_attention,
    make_encoder_blocks,
    make_head,
    prepend_tokens,
    zero_head,
)
from vitrail.models.parts.siglip_and_simple_vit import SIGLIP_AND_SIMPLE_ALIASES, SIGLIP_AND_SIMPLE_FIELDS

Positions = Literal["none", "learned", "learned_2d", "sincos", "sincos_2d", "sincos_simple", "relative", "rotary"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    width: int = 768  # channels of a token
    depth: int = 12  # blocks
    heads: int = 12  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 4·width
    activation: Activation = "gelu"  # Google trained with gelu_tanh; timm, and so the presets, run with the exact one
    qkv_bias: bool = True
    norm_eps: float = 1e-6  # transformers: 1e-12
    layer_scale: float | None = None  # the factor that a block's branches start with; none: no factor
    class_token: bool = True
    registers: int = field(default=0, metadata=MAY_BE_ZERO)  # extra tokens without a patch (Darcet 2023)
    positions: Positions = "learned"  # sincos_simple is SimpleViT's
    positions_at: Literal["stem", "layers", "shared"] = "stem"  # layers: each its own table; shared: one for all
    prefix_positions: bool = True  # whether a learned 1-D or sinusoidal table has rows for the prefix tokens too
    pool: Literal["class", "mean", "mean_norm", "map"] = "class"  # mean_norm: the final norm after the mean
    head: Literal["linear", "mlp"] = "linear"  # mlp: one tanh layer before it, as in pre-training
    dropout: float = field(default=0.0, metadata=RATE)
    attention_dropout: float = field(default=0.0, metadata=RATE)
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last block; linear from 0 at the first
    dynamic: bool = False  # accept any multiple of the patch size at run time; the table is resampled

    def __post_init__(self) -> None:
        check_patch_config(self)
        if self.pool == "class" and not self.class_token:
            raise ConfigError("pool 'class' without a class token; expected class_token=True or another pool")
        if self.positions_at != "stem" and self.positions in ("none", "relative", "rotary"):
            raise ConfigError(f"positions {self.positions!r} are not added anywhere; expected positions_at='stem'")
        parts = {"learned_2d": 2, "sincos": 2, "rotary": 4 * self.heads}.get(self.positions, 1)
        parts = 4 if self.positions in ("sincos_2d", "sincos_simple") else parts
        if self.width % parts:
            raise ConfigError(f"width {self.width}; expected a multiple of {parts} for positions {self.positions!r}")


class ViT(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D).

    `forward`, in contract.py, calls `patches`, `add_positions`, `run`, the final norm and `logits`, in this order.
    """

    config: ViTConfig
    first_filters = "patch_embed.proj.weight"
    takes_mask = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        width, eps, mlp_width = config.width, config.norm_eps, config.mlp_width or 4 * config.width
        patch = pair(config.patch_size)
        self.declare_level(patch)
        registers = tuple(f"register{number}" for number in range(config.registers))
        self.prefix_tokens = ("class", *registers) if config.class_token else registers
        self.classifier_tokens = ("class",) if config.pool == "class" else ()
        self.attention_pool = "attn_pool" if config.pool == "map" else ""
        self.classifiers = ((config.pool.removesuffix("_norm"), "head"),) if config.classes else ()
        if config.positions in ("relative", "rotary"):
            self.no_dropping_reason = f"positions {config.positions!r} need the position of every token"
        elif config.positions_at != "stem":
            self.no_dropping_reason = f"positions_at {config.positions_at!r} adds a position in every layer"

        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, config.registers, width)) if config.registers else None
        self.pos_embed = self.pos_rows = self.pos_columns = None
        tables = config.depth if config.positions_at == "layers" and config.positions.startswith("learned") else 1
        if config.positions == "learned_2d":
            self.pos_rows = nn.Parameter(torch.empty(tables, self.grid[0], width // 2))
            self.pos_columns = nn.Parameter(torch.empty(tables, self.grid[1], width // 2))
        elif config.positions in ("learned", *FIXED_TABLES):  # fixed ones too: public weights contain them
            rows = self.grid[0] * self.grid[1] + (self.prefix if config.prefix_positions else 0)
            self.pos_embed = nn.Parameter(torch.empty(tables, rows, width), requires_grad=config.positions == "learned")
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_encoder_blocks(
            config,
            mlp_width,
            activation=config.activation,
            qkv_bias=config.qkv_bias,
            layer_scale=config.layer_scale,
            positions=lambda: in_attention(config.positions, width // config.heads, self.grid),
        )
        self.norm = nn.Identity() if config.pool == "mean_norm" else nn.LayerNorm(width, eps)
        self.attn_pool = None
        if config.pool == "map":
            tanh = config.activation == "gelu_tanh"
            self.attn_pool = AttentionPool(width, config.heads, mlp_width, tanh=tanh, norm_eps=eps)
        self.fc_norm = nn.LayerNorm(width, eps) if config.pool == "mean_norm" else nn.Identity()
        self.pre_logits = nn.Linear(width, width) if config.head == "mlp" else None
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """Every weight as in the ViT authors' code; the head is zero, so training starts from equal probabilities."""
        init_layers(self)
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        for table in (self.reg_token, self.pos_embed, self.pos_rows, self.pos_columns):
            if table is not None:
                nn.init.normal_(table, std=0.02)
        if self.pos_embed is not None and self.config.positions != "learned":
            table = FIXED_TABLES[self.config.positions](self.grid, self.config.width)
            self.pos_embed.copy_(F.pad(table, (0, 0, self.pos_embed.shape[1] - table.shape[0], 0)))
        if self.pre_logits is not None:
            lecun_normal_(self.pre_logits.weight)
        zero_head(self.head)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        """Add the prefix tokens and, at the stem, the positions: (B, n, D) → (B, N, D)."""
        x = prepend_tokens(patches, self.cls_token, self.reg_token)
        tables = self.tables(grid) if self.config.positions_at == "stem" else None
        return x if tables is None else x + tables[0]

    def run(self, x: Tensor, grid: Grid, queries: int | None = None, mask: Tensor | None = None) -> Tensor:
        """All blocks; with `queries`, the last one computes only the first `queries` tokens: (B, N, D).

        The `mask` of the attention is True for the keys that a query attends to; it broadcasts to (B, H, N, N).
        """
        tables = None if self.config.positions_at == "stem" else self.tables(grid)
        for layer, block in enumerate(self.blocks):
            x = x if tables is None else x + tables[layer]
            x = x if layer else self.pos_drop(x)
            x = block(x, grid, queries if layer == len(self.blocks) - 1 else None, mask)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for `tokens`: (B, N, D) → (B, classes)."""
        pooled = self.pool(tokens)
        return self.head(pooled if self.pre_logits is None else self.pre_logits(pooled).tanh())

    def tables(self, grid: Grid) -> Tensor | None:
        """The positions added before the first layer, (1, N, D), or before each layer, (L, N, D)."""
        table = self.pos_embed
        if self.pos_rows is not None and self.pos_columns is not None:
            table = join_axes(self.pos_rows, self.pos_columns)
        if table is None:
            return None
        table = resample(table, self.grid, grid)
        table = F.pad(table, (0, 0, self.prefix + grid[0] * grid[1] - table.shape[1], 0))  # prefix tokens without rows
        return table if self.config.positions_at == "stem" else table.expand(self.config.depth, -1, -1)

    def pool(self, tokens: Tensor) -> Tensor:
        """One vector per image: (B, N, D) → (B, D)."""
        if self.config.pool == "class":
            return tokens[:, 0]
        patches = tokens[:, self.prefix :]
        return self.fc_norm(patches.mean(1)) if self.attn_pool is None else self.attn_pool(patches)


SIZES = {
    "tiny": ViTConfig(width=192, heads=3),
    "small": ViTConfig(width=384, heads=6),
    "base": ViTConfig(),
    "large": ViTConfig(width=1024, depth=24, heads=16),
    "huge": ViTConfig(width=1280, depth=32, heads=16),
    "giant": ViTConfig(width=1408, depth=40, heads=16, mlp_width=6144),
    "gigantic": ViTConfig(width=1664, depth=48, heads=16, mlp_width=8192),
}
RESOLUTIONS = {8: (224, 384), 14: (224, 336, 518), 16: (224, 384, 512), 32: (224, 384, 512)}
PLAIN = [(size, patch, pixels) for size in SIZES for patch in RESOLUTIONS for pixels in RESOLUTIONS[patch]]
MEAN = [(size, patch) for size in ("small", "base") for patch in (16, 32)]  # Google's -gap models
DINO = ViTConfig(patch_size=14, image_size=518, layer_scale=1e-5, classes=0)
DINOV2 = {
    "small": replace(DINO, width=384, heads=6),
    "base": DINO,
    "large": replace(DINO, width=1024, depth=24, heads=16),
    "giant": replace(DINO, width=1536, depth=40, heads=24, mlp_width=4096, activation="swiglu"),
}
PRESETS = Presets(
    lambda: {
        **{f"vit_{s}_patch{p}_{px}": replace(SIZES[s], patch_size=p, image_size=px) for s, p, px in PLAIN},
        **{
            f"vit_{s}_patch{p}_mean_224": replace(SIZES[s], patch_size=p, pool="mean", class_token=False)
            for s, p in MEAN
        },
        "vit_base_patch16_gap_224": replace(SIZES["base"], heads=16, pool="mean", class_token=False),  # as in timm
        "vit_huge_patch14_gap_224": replace(SIZES["huge"], patch_size=14, pool="mean", class_token=False),
        **{name: ViTConfig(**fields) for name, fields in SIGLIP_AND_SIMPLE_FIELDS.items()},
        **{f"vit_{s}_patch14_dinov2": DINOV2[s] for s in DINOV2},
        **{f"vit_{s}_patch14_reg4_dinov2": replace(DINOV2[s], registers=4, prefix_positions=False) for s in DINOV2},
    }
)
LETTERS = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g", "gigantic": "G"}
ALIASES = {
    **{f"ViT-{LETTERS[s]}/{p}{'' if px == 224 else f'@{px}'}": f"vit_{s}_patch{p}_{px}" for s, p, px in PLAIN},
    **{f"ViT-{LETTERS[s]}/{p}-gap": f"vit_{s}_patch{p}_mean_224" for s, p in MEAN},
    **SIGLIP_AND_SIMPLE_ALIASES,
}
SOURCES = (TIMM, FACEBOOK, DINO_SWIGLU, *WRITTEN_AS_VIT, HF_VIT, HF_REGISTER, *HF_DINO, HF_SIGLIP)
CHECKPOINT = CheckpointSide(infer_config=infer_vit_config, sources=SOURCES, heads_by_width=True)
FAMILY = Family("vit", ViTConfig, ViT, PRESETS, ALIASES, CHECKPOINT)
