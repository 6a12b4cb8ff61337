"""CaiT (Touvron 2021, arXiv 2103.17239): a deeper ViT with LayerScale, whose class token joins only at the end.

B batch, n = h·w patches, N = 1 + n tokens, D width, H heads, K width of a head.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.attention import Attention, Mask, SelfAttention
from vitrail.layers.block import Block, LayerScale, Mlp
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import RATE, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import Initialization, init_as_deit, init_as_published
from vitrail.models.names import encoder_names
from vitrail.models.parts.encoder import EncoderConfig, PatchEncoder, make_head, prepend_tokens, zero_head


@dataclass(frozen=True, kw_only=True)
class CaiTConfig(EncoderConfig):  # all rates of what is dropped: only in the blocks of patches
    width: int = 384  # channels of a token
    depth: int = 24  # blocks of patches with talking heads
    class_depth: int = 2  # blocks after them, in which the class token attends to the patches
    heads: int = 8  # attention heads, each width / heads wide
    layer_scale: float = 1e-5  # the factor that a block's branches start with
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # the same in every block
    initialization: Initialization = "vit"  # of patches and head; deit: of the authors, as in the presets


class CaiT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: CaiTConfig
    prefix_tokens = classifier_tokens = ("class",)  # joins after the blocks of patches
    first_filters = "patch_embed.proj.weight"

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config)
        width, eps, mlp_width = config.width, config.norm_eps, config.mlp_width or 4 * config.width
        patch = pair(config.patch_size)
        self.declare_level(patch)
        class_blocks = (f"blocks_token_only.{layer}" for layer in range(config.class_depth))
        self.levels = (replace(self.levels[0], blocks=(*self.levels[0].blocks, *class_blocks)),)
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, math.prod(self.grid), width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.heads,
                mlp_width,
                norm_eps=eps,
                layer_scale=config.layer_scale,
                dropout=config.dropout,
                stochastic_depth=config.stochastic_depth,
            )
            for _ in range(config.depth)
        )
        for block in self.blocks:
            block.attn = TalkingHeads(width, config.heads, dropout=config.attention_dropout)
        self.blocks_token_only = nn.ModuleList(
            ClassBlock(width, config.heads, mlp_width, layer_scale=config.layer_scale, norm_eps=eps)
            for _ in range(config.class_depth)
        )
        self.norm = nn.LayerNorm(width, eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in DeiT's code; by default with the patches of ViT's, and a head of zero."""
        if self.config.initialization == "deit":
            init_as_published(self, self.patch_embed.proj, self.cls_token, self.pos_embed)
            return
        init_as_deit(self, self.cls_token, self.pos_embed)
        zero_head(self.head)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        return self.pos_drop(patches + self.tables(grid))

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, grid)
        x = prepend_tokens(x, self.cls_token)  # (B, N, D)
        for block in self.blocks_token_only:
            x = block(x)
        return x[:, :queries]


class TalkingHeads(SelfAttention):
    """Self-attention whose heads are mixed before and after the softmax (Shazeer 2020, arXiv 2003.02436)."""

    no_shares_reason: ClassVar[str] = "its heads are mixed after the softmax, so attention rows do not sum to 1"

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.proj_l = HeadMix(heads, heads)  # of the logits
        self.proj_w = HeadMix(heads, heads)  # of the weights

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.proj_l(q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1))  # (B, H, Nq, N)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return self.proj_w(scores.softmax(-1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return F.dropout(self.weigh(q, k, mask), self.dropout, self.training) @ v


class HeadMix(nn.Linear):
    """Replaces each head's map by a mixture of all heads' maps: (B, H, Nq, N) → (B, H, Nq, N)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)  # attention maps are captured in float32
        # W·maps + b per image: about 3 times as fast as a linear map with the heads moved to the last axis
        rows = torch.baddbmm(bias[:, None], weight.expand(input.shape[0], -1, -1), input.flatten(2))
        return rows.unflatten(2, input.shape[2:])


class ClassBlock(nn.Module):
    """A block in which only the class token attends to all tokens; patches stay unchanged: (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, heads: int, mlp_width: int, *, layer_scale: float, norm_eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, norm_eps)
        self.attn = Attention(width, heads)
        self.ls1 = LayerScale(width, layer_scale)
        self.norm2 = nn.LayerNorm(width, norm_eps)
        self.mlp = Mlp(width, mlp_width)
        self.ls2 = LayerScale(width, layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        token = x[:, :1] + self.ls1(self.attn(normed[:, :1], normed))  # (B, 1, D)
        token = token + self.ls2(self.mlp(self.norm2(token)))
        return torch.cat([token, x[:, 1:]], dim=1)


SMALL = CaiTConfig(initialization="deit")
SIZES = {  # heads are 48 wide
    "xxs24": replace(SMALL, width=192, heads=4),
    "xxs36": replace(SMALL, width=192, heads=4, depth=36),
    "xs24": replace(SMALL, width=288, heads=6),
    "s24": SMALL,
    "s36": replace(SMALL, depth=36, layer_scale=1e-6),
    "m36": replace(SMALL, width=768, heads=16, depth=36, layer_scale=1e-6),
    "m48": replace(SMALL, width=768, heads=16, depth=48, layer_scale=1e-6),
}
RESOLUTIONS = {"xxs24": (224, 384), "xxs36": (224, 384), "s24": (224, 384), "m48": (448,)}
PUBLISHED = [(size, pixels) for size in SIZES for pixels in RESOLUTIONS.get(size, (384,))]
PRESETS = Presets(
    lambda: {f"cait_{size}_{pixels}": replace(SIZES[size], image_size=pixels) for size, pixels in PUBLISHED}
)
ALIASES = {
    f"CaiT-{size.upper()}{'' if pixels == 224 else f'@{pixels}'}": f"cait_{size}_{pixels}" for size, pixels in PUBLISHED
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """The class token has no position; the number of heads follows from the matrices that mix heads."""
    fields = encoder_names.infer_encoder_fields(shapes)
    fields["class_depth"] = side.count_numbers(shapes, r"blocks_token_only\.(\d+)\.")
    fields["heads"] = side.get_shape(shapes, "blocks.0.attn.proj_l.weight", 2)[0]
    fields["initialization"] = "deit"
    return side.InferredConfig(fields=fields, stride=fields["patch_size"])


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = encoder_names.make_timm_arguments(config)
    arguments |= {"depth_token_only": config["class_depth"], "mlp_ratio_token_only": arguments["mlp_ratio"]}
    return encoder_names.make_timm_card(config, "cait_xxs24_224", arguments)


NAME_TABLE = encoder_names.TIMM_BASE_TABLE + side.parse_table(
    """
    blocks.#.attn.{proj_l,proj_w}.*
    {blocks,blocks_token_only}.#.gamma_{1,2} -> {blocks,blocks_token_only}.#.ls{1,2}.gamma
    blocks_token_only.#.{norm1,attn.q,attn.proj,norm2,mlp.fc#}.*
    blocks_token_only.#.attn.[k,v].* -> blocks_token_only.#.attn.kv.*
    """
)
MARKERS = (encoder_names.PATCH_KERNEL, "blocks_token_only.0.norm1.weight")
SOURCES = (
    replace(
        encoder_names.TIMM,
        table=NAME_TABLE,
        markers=MARKERS,
        card=make_timm_card,
        details={
            **encoder_names.TIMM_DETAILS,
            "only_in_timm": True,
            "imagenet_mean": True,
            "pretrained_cfg": {"crop_pct": 1.0},
        },
    ),
    side.SourceNames(
        layout="deit",
        table=NAME_TABLE,
        markers=MARKERS,
        assumed=encoder_names.TIMM_ASSUMED,
        details={**encoder_names.TIMM_DETAILS, "prefix": "module.", "cropped": False, "named_as_in_timm": True},
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("cait", CaiTConfig, CaiT, PRESETS, ALIASES, CHECKPOINT)
