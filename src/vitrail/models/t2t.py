"""T2T-ViT (Yuan 2021, arXiv 2101.11986): overlapping patches become tokens in steps, then a deep and narrow ViT.

B batch, h×w grid of N tokens at a step, C channels of an image or a step, S width of a stage, M features of a
performer, n = (H/16)·(W/16) tokens in the end, D width, L layers.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import attention
from vitrail.layers.block import Mlp
from vitrail.layers.positions import Grid, sinusoid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, check_grid, check_heads, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.encoder import PatchEncoder, make_encoder_blocks, make_head, zero_head

SOFT_SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # patch size, stride, padding
PATCH_SIZE = (16, 16)  # pixels per token: the product of the strides


@dataclass(frozen=True, kw_only=True)
class T2TConfig:
    image_size: Size = 224  # rows, columns; one number for a square
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the class token
    stage: Literal["performer", "transformer"] = "performer"  # attention between two splits
    stage_width: int = 64  # of a token between two splits
    width: int = 384  # of a token in the backbone
    depth: int = 14  # blocks
    heads: int = 6  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 3·width
    norm_eps: float = 1e-5
    dropout: float = field(default=0.0, metadata=RATE)
    attention_dropout: float = field(default=0.0, metadata=RATE)
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # of the last block, 0 at the first; 0.1 in the paper
    stage_dropout: float = field(default=0.0, metadata=RATE)  # of both branches; 0.1 for performers in the paper
    dynamic: bool = False  # accept any multiple of 16 pixels at run time; the table is resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)
        check_grid(pair(self.image_size), PATCH_SIZE)
        if self.stage_width < 2:  # a performer has stage_width / 2 features
            raise ConfigError(f"stage_width is {self.stage_width}; expected 2 or more")


class T2T(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: T2TConfig
    prefix_tokens = classifier_tokens = ("class",)
    no_masking_reason = "it mixes patches in its stem"

    def __init__(self, config: T2TConfig) -> None:
        super().__init__(config)
        width, eps, mlp_width = config.width, config.norm_eps, config.mlp_width or 3 * config.width
        self.declare_level(PATCH_SIZE)
        self.tokens_to_token = TokensToToken(
            config.channels,
            config.stage_width,
            width,
            performer=config.stage == "performer",
            norm_eps=eps,
            dropout=config.stage_dropout,
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + math.prod(self.grid), width), requires_grad=False)
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_encoder_blocks(config, mlp_width, qkv_bias=False)
        self.norm = nn.LayerNorm(width, eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """Every weight as in the T2T authors' code, except that the head is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, TokenPerformer):
                nn.init.orthogonal_(module.w, gain=math.sqrt(len(module.w)))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.pos_embed.copy_(sinusoid(torch.arange(self.pos_embed.shape[1]), self.config.width))  # class token at 0
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return self.tokens_to_token(images), grid


def soft_split(x: Tensor, side: int, step: int, padding: int) -> Tensor:
    """Each overlapping patch as one token, channel by channel, as F.unfold: (B, H, W, C) → (B, h, w, C·side²).

    Views of the padded tensor and one copy: 1.6 × as fast as F.unfold on images and in exports, as fast in training.
    """
    x = F.pad(x, (0, 0, padding, padding, padding, padding))
    return x.unfold(1, side, step).unfold(2, side, step).flatten(3)


class TokensToToken(nn.Module):
    """Split, attention, split, attention, split: (B, C, H, W) → (B, n, D)."""

    def __init__(
        self, channels: int, stage_width: int, width: int, *, performer: bool, norm_eps: float, dropout: float
    ) -> None:
        super().__init__()
        stage = TokenPerformer if performer else TokenTransformer
        first, second, last = (side**2 for side, _, _ in SOFT_SPLITS)
        self.attention1 = stage(first * channels, stage_width, norm_eps=norm_eps, dropout=dropout)
        self.attention2 = stage(second * stage_width, stage_width, norm_eps=norm_eps, dropout=dropout)
        self.project = nn.Linear(last * stage_width, width)

    def forward(self, images: Tensor) -> Tensor:
        x = soft_split(images.movedim(1, -1), *SOFT_SPLITS[0])  # (B, H/4, W/4, 49·C)
        for layer, split in ((self.attention1, SOFT_SPLITS[1]), (self.attention2, SOFT_SPLITS[2])):
            x = layer(x.flatten(1, 2)).unflatten(1, x.shape[1:3])  # (B, h, w, S)
            x = soft_split(x, *split)  # (B, h/2, w/2, 9·S)
        return self.project(x.flatten(1, 2))


class TokenTransformer(nn.Module):
    """Attention with one head, then an MLP; the residual is v, which has the new width: (B, N, C) → (B, N, S)."""

    bias: ClassVar[bool] = False

    def __init__(self, in_width: int, width: int, *, norm_eps: float, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(in_width, norm_eps)
        self.qkv = nn.Linear(in_width, 3 * width, bias=self.bias)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, norm_eps)
        self.mlp = Mlp(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)  # (B, N, S) each
        x = v + self.drop(self.proj(self.mix(q, k, v)))
        return x + self.drop(self.mlp(self.norm2(x)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q·kᵀ/√C)·v: scaled by the width of the input, not of the keys, as in the authors' code."""
        scale = 1 / math.sqrt(self.qkv.in_features)
        return attention(q[:, None], k[:, None], v[:, None], scale=scale)[:, 0]


class TokenPerformer(TokenTransformer):
    """The same with positive random features, linear in N (Choromanski 2020, arXiv 2009.14794): (B, N, C) → (B, N, S).

    φ(q)·φ(k) estimates exp(q·k) if the rows of w are drawn from N(0, 1). The authors fix orthogonal rows of norm √M,
    which are shorter and therefore estimate a different kernel; the weights are trained with it.
    """

    bias: ClassVar[bool] = True

    def __init__(self, in_width: int, width: int, *, norm_eps: float, dropout: float) -> None:
        super().__init__(in_width, width, norm_eps=norm_eps, dropout=dropout)
        self.w = nn.Parameter(torch.empty(width // 2, width), requires_grad=False)  # (M, S)

    def features(self, x: Tensor) -> Tensor:
        """φ(x) = exp(w·x − |x|²/2)/√M, in float32 at least: (B, N, S) → (B, N, M)."""
        x, w = (each.float() if each.itemsize < 4 else each for each in (x, self.w))
        return torch.exp(x @ w.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(w))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """φ(q)·Σφ(k)vᵀ / (φ(q)·Σφ(k) + 1e-8), both multiplied by 1e8, as torch's ONNX exporter writes 1e-8 as 0."""
        device = "cpu" if q.is_meta else q.device.type
        with torch.autocast(device, enabled=False):  # features may be larger than float16 can hold
            qp, kp = self.features(q), self.features(k)
            mixed = qp @ (kp.transpose(1, 2) @ v.to(kp.dtype))  # (B, N, S), by (B, M, S)
            total = qp @ kp.sum(1)[..., None]  # (B, N, 1)
            return (1e8 * mixed / (1e8 * total + 1)).to(v.dtype)


SMALL = T2TConfig(width=256, heads=4, mlp_width=512)
SIZES = {
    7: replace(SMALL, depth=7),
    10: replace(SMALL, depth=10),
    12: replace(SMALL, depth=12),
    14: T2TConfig(),
    19: T2TConfig(width=448, depth=19, heads=7),
    24: T2TConfig(width=512, depth=24, heads=8),
}
PRESETS = Presets(
    lambda: {
        **{f"t2t_vit_{depth}": config for depth, config in SIZES.items()},
        **{f"t2t_vit_t_{depth}": replace(SIZES[depth], stage="transformer") for depth in (14, 19, 24)},
    }
)
ALIASES = {
    **{f"T2T-ViT-{depth}": f"t2t_vit_{depth}" for depth in SIZES},
    **{f"T2T-ViT_t-{depth}": f"t2t_vit_t_{depth}" for depth in (14, 19, 24)},
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    hidden, width = side.get_shape(shapes, "blocks.0.mlp.fc1.weight", 2)
    fields = {
        "channels": side.get_shape(shapes, "tokens_to_token.attention1.qkv.weight", 2)[1] // SOFT_SPLITS[0][0] ** 2,
        "classes": side.count_classes(shapes, "head.weight"),
        "stage": "performer" if "tokens_to_token.attention1.w" in shapes else "transformer",
        "stage_width": side.get_shape(shapes, "tokens_to_token.attention1.proj.weight", 2)[0],
        "width": width,
        "depth": side.count_numbers(shapes, r"blocks\.(\d+)\."),
        "mlp_width": None if hidden == 3 * width else hidden,
    }
    return side.InferredConfig(fields=fields, stride=PATCH_SIZE, prefix=1)


def swap_keys_and_queries(tensor: Tensor) -> Tensor:
    """k, q, v ↔ q, k, v."""
    first, second, v = tensor.chunk(3)
    return torch.cat((second, first, v))


KQV_TRANSFORM = side.TensorTransform(
    lambda parts: swap_keys_and_queries(parts[0]), lambda tensor, _: [swap_keys_and_queries(tensor)]
)
BACKBONE_TABLE = """
    {cls_token,pos_embed,blocks.#.attn.qkv.weight}
    {tokens_to_token.project,tokens_to_token.attention#.norm1,tokens_to_token.attention#.norm2,norm,head}.*
    blocks.#.{norm1,attn.proj,norm2,mlp.fc1,mlp.fc2}.*
"""
PERFORMER_TABLE = """
    tokens_to_token.attention#.:
        w
        proj.*
        kqv.* -> qkv.* | swapped
        mlp.{0,2}.* -> mlp.{fc1,fc2}.*
"""
TRANSFORMER_TABLE = """
    tokens_to_token.attention#.:
        attn.{qkv.weight,proj.*} -> {qkv.weight,proj.*}
        mlp.{fc1,fc2}.*
"""
PERFORMER = side.SourceNames(
    layout="t2t",
    table=side.parse_table(BACKBONE_TABLE + PERFORMER_TABLE, swapped=KQV_TRANSFORM),
    markers=("tokens_to_token.project.weight", "tokens_to_token.attention1.w"),
    accepts=lambda config: config["stage"] == "performer",
    assumed={"norm_eps": 1e-5},
)
TRANSFORMER = side.SourceNames(
    layout="t2t",
    table=side.parse_table(BACKBONE_TABLE + TRANSFORMER_TABLE),
    markers=("tokens_to_token.project.weight",),
    assumed={"norm_eps": 1e-5},
)
SOURCES = tuple(replace(each, layout=name) for name in ("t2t", "t2t_by_width") for each in (PERFORMER, TRANSFORMER))
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, mlp_ratio=3)
FAMILY = Family("t2t", T2TConfig, T2T, PRESETS, ALIASES, CHECKPOINT)
