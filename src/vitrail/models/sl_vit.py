"""SL-ViT (Lee 2021, arXiv 2112.13492): a ViT for small data sets, with shifted patches and local attention.

Shifted patch tokenization (SPT): a token also reads four copies of the image, shifted diagonally by half a patch.
Locality self-attention (LSA): no token attends to itself, and each head learns how sharply it attends.
B batch, C channels, n = h·w patches of P×Q pixels, N = 1 + n tokens, D width, H heads, K width of a head.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError
from vitrail.layers.attention import Mask, Projected, SelfAttention, join_masks
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import EncoderConfig, PatchEncoder, make_head, zero_head

SHIFTS = ((-1, -1), (-1, 1), (1, -1), (1, 1))  # rows, columns, in half patches


@dataclass(frozen=True, kw_only=True)
class SLViTConfig(EncoderConfig):
    image_size: Size = 32  # rows, columns; one number for a square
    patch_size: Size = 4
    classes: int = field(default=10, metadata=MAY_BE_ZERO)  # 0: no head, returns the class token
    width: int = 192  # channels of a token
    depth: int = 9  # blocks
    heads: int = 12  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 2·width
    shifted_patches: bool = True  # SPT; otherwise a token reads its patch alone
    local_attention: bool = True  # LSA; otherwise as in a ViT
    norm_eps: float = 1e-5
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # the same in every block; 0.1 in the paper


class SLViT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: SLViTConfig
    prefix_tokens = classifier_tokens = ("class",)

    def __init__(self, config: SLViTConfig) -> None:
        super().__init__(config)
        width, eps, patch = config.width, config.norm_eps, pair(config.patch_size)
        self.declare_level(patch)
        if config.shifted_patches:
            self.no_masking_reason = "its shifted copies mix neighboring patches before they become tokens"
        self.patch_embed = PatchRows(width, patch, config.channels, eps, shifted=config.shifted_patches)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + math.prod(self.grid), width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.heads,
                config.mlp_width or 2 * width,
                qkv_bias=False,
                norm_eps=eps,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                stochastic_depth=config.stochastic_depth,
            )
            for _ in range(config.depth)
        )
        if config.local_attention:
            for block in self.blocks:
                block.attn = LocalitySelfAttention(width, config.heads, bias=False, dropout=config.attention_dropout)
        self.norm = nn.LayerNorm(width, eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code, with large tables; the head is zero."""
        init_layers(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, LocalitySelfAttention):
                nn.init.constant_(module.scale, module.head_width**-0.5)
        for table in (self.cls_token, self.pos_embed):
            nn.init.normal_(table)
        zero_head(self.head)


class PatchRows(nn.Module):
    """Patches as rows, pixel by pixel with all its channels, then a linear map: (B, C, H, W) → (B, n, D).

    If `shifted`, four shifted copies of the image are further channels, and rows are normalized.
    """

    def __init__(self, width: int, patch: tuple[int, int], channels: int, norm_eps: float, *, shifted: bool) -> None:
        super().__init__()
        self.patch, self.shifted = patch, shifted
        row = patch[0] * patch[1] * channels * (1 + len(SHIFTS) if shifted else 1)
        self.norm = nn.LayerNorm(row, norm_eps) if shifted else nn.Identity()
        self.proj = nn.Linear(row, width)

    def forward(self, images: Tensor) -> Tensor:
        images = add_shifted_copies(images, self.patch) if self.shifted else images
        p, q = self.patch
        patches = images.unflatten(3, (-1, q)).unflatten(2, (-1, p))  # (B, C, h, P, w, Q)
        rows = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, n, P·Q·C)
        return self.proj(self.norm(rows))


def add_shifted_copies(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """The images and four copies, shifted diagonally by half a patch; zeros enter: (B, C, H, W) → (B, 5·C, H, W)."""
    h, w = images.shape[2:]
    p, q = patch[0] // 2, patch[1] // 2
    padded = F.pad(images, (q, q, p, p))
    starts = [(p + rows * p, q + columns * q) for rows, columns in SHIFTS]
    return torch.cat([images, *(padded[:, :, y : y + h, x : x + w] for y, x in starts)], dim=1)


class LocalitySelfAttention(SelfAttention):
    """Self-attention to all other tokens, with a learned scale of the scores per head."""

    def __init__(self, width: int, heads: int, *, bias: bool, dropout: float = 0.0) -> None:
        super().__init__(width, heads, bias=bias, dropout=dropout)
        self.head_width = width // heads
        self.scale = nn.Parameter(torch.empty(heads))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        q, k, v, mask = super().project(x, grid, mask, queries)
        q = q * (self.scale * math.sqrt(self.head_width))[:, None, None]  # the scores are divided by √K later
        others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)[:queries]  # (Nq, N)
        return q, k, v, join_masks(others, mask)


PRESETS = Presets(
    lambda: {
        "sl_vit_patch4_32": SLViTConfig(),  # CIFAR-10
        "sl_vit_patch8_64": SLViTConfig(image_size=64, patch_size=8, classes=200),  # Tiny ImageNet
    }
)
ALIASES = {"SL-ViT": "sl_vit_patch4_32", "SL-ViT@64": "sl_vit_patch8_64"}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    width, row = side.get_shape(shapes, "patch_embed.proj.weight", 2)
    shifted, local = "patch_embed.norm.weight" in shapes, "blocks.0.attn.scale" in shapes
    patch, channels = infer_patch(row // 5 if shifted else row)
    hidden = side.get_shape(shapes, "blocks.0.mlp.fc1.weight", 2)[0]
    fields = {
        "patch_size": patch,
        "channels": channels,
        "classes": side.count_classes(shapes, "head.weight"),
        "width": width,
        "depth": side.count_numbers(shapes, r"blocks\.(\d+)\."),
        "mlp_width": None if hidden == 2 * width else hidden,
        "shifted_patches": shifted,
        "local_attention": local,
    }
    if local:
        fields["heads"] = side.get_shape(shapes, "blocks.0.attn.scale", 1)[0]
    return side.InferredConfig(fields=fields, stride=patch, prefix=1)


def infer_patch(numbers: int) -> tuple[tuple[int, int], int]:
    """The square patch of color or gray images that has so many numbers: P·P or 3·P·P, never both."""
    for channels in (3, 1):
        pixels = math.isqrt(numbers // channels)
        if channels * pixels**2 == numbers:
            return (pixels, pixels), channels
    raise CheckpointError(f"a patch of {numbers} numbers; expected a square of pixels with 1 or 3 channels")


def has_plain_patches(config: side.ConfigFields) -> bool:
    return not config["shifted_patches"]


BODY = """
    {cls_token,pos_embedding} -> {cls_token,pos_embed}
    transformer.layers.#. -> blocks.#.:
        0.norm.* -> norm1.*
        0.fn.{scale,to_qkv.weight,to_out.0.*} -> attn.{scale,qkv.weight,proj.*}
        1.norm.* -> norm2.*
        1.fn.net.{0,3}.* -> mlp.{fc1,fc2}.*
    mlp_head.{0,1}.* -> {norm,head}.*
"""
SHIFTED = side.SourceNames(
    layout="authors",
    table=side.parse_table(BODY + "to_patch_embedding.merging.{1,2}.* -> patch_embed.{norm,proj}.*"),
    markers=("to_patch_embedding.merging.2.weight",),
    accepts=lambda config: config["shifted_patches"],
    assumed={"norm_eps": 1e-5},
    heads={192: 12},
    details={
        "kernel": "to_patch_embedding.merging.2.weight",
        "wrapper": "model_state_dict",
        "preprocessing": {"crop": 1.0, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)},  # CIFAR-10
    },
)
PLAIN = replace(
    SHIFTED,
    table=side.parse_table(BODY + "to_patch_embedding.1.* -> patch_embed.proj.*"),
    markers=("to_patch_embedding.1.weight", "transformer.layers.#.0.fn.to_qkv.weight"),
    accepts=has_plain_patches,
    details={**SHIFTED.details, "kernel": "to_patch_embedding.1.weight"},
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config,
    sources=(SHIFTED, PLAIN),
    resampled={"pos_embed": "grid"},  # the rows of a shifted patch are not a kernel that can be resized
    mlp_ratio=2,
)
FAMILY = Family("sl_vit", SLViTConfig, SLViT, PRESETS, ALIASES, CHECKPOINT)
