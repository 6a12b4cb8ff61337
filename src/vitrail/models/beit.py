"""BEiT (Bao 2021, arXiv 2106.08254) and BEiT-v2 (Peng 2022, arXiv 2208.06366): a ViT that knows offsets, not places.

Nothing is added to the tokens; the attention has a learned bias for each offset between two patches. Pre-trained
models, and those of SimMIM (Xie 2021, arXiv 2111.09886), have one table for all blocks, fine-tuned ones one per block.
B batch, n = h·w patches, N = 1 + n tokens, D width, H heads, R = (2h−1)·(2w−1) offsets.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, join_masks
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_scaled_layers
from vitrail.models.names import encoder_names, hf_names
from vitrail.models.parts.attention import KeylessBiasLinear
from vitrail.models.parts.encoder import EncoderConfig, make_encoder_blocks, make_head, prepend_tokens, zero_head


@dataclass(frozen=True, kw_only=True)
class BeitConfig(EncoderConfig):
    layer_scale: float | None = 1e-5  # the factor that a block's branches start with; none: no factor
    shared_bias: bool = False  # one table of biases for all blocks, as in pre-training; false: one per block
    pool: Literal["mean_norm", "class"] = "mean_norm"  # mean_norm: the final norm after the mean of the patches


class Beit(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: BeitConfig
    prefix_tokens = ("class",)
    first_filters = "patch_embed.proj.weight"
    takes_mask = True
    no_dropping_reason = "its biases need the position of every token"

    def __init__(self, config: BeitConfig) -> None:
        super().__init__(config)
        width, eps, patch = config.width, config.norm_eps, pair(config.patch_size)
        self.declare_level(patch)
        mean = config.pool == "mean_norm"
        self.classifier_tokens = () if mean else ("class",)
        self.classifiers = (("mean" if mean else "class", "head"),) if config.classes else ()
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.rel_pos_bias = ClassOffsetBias(config.heads, self.grid) if config.shared_bias else None
        self.blocks = make_encoder_blocks(config, config.mlp_width or 4 * width, layer_scale=config.layer_scale)
        for block in self.blocks:
            bias = None if config.shared_bias else ClassOffsetBias(config.heads, self.grid)
            block.attn = OffsetAttention(width, config.heads, bias, dropout=config.attention_dropout)
        self.norm = nn.Identity() if mean else nn.LayerNorm(width, eps)
        self.fc_norm = nn.LayerNorm(width, eps) if mean else nn.Identity()
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code, biases by offset are zero; so is the head."""
        init_scaled_layers(self, self.blocks)
        for module in self.modules():
            if isinstance(module, ClassOffsetBias):
                nn.init.zeros_(module.offsets)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        zero_head(self.head)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002  # the attention has them
        return self.pos_drop(prepend_tokens(patches, self.cls_token))

    def run(self, x: Tensor, grid: Grid, queries: int | None = None, mask: Tensor | None = None) -> Tensor:
        """All blocks; with `queries`, only the first `queries` tokens are returned: (B, N, D).

        The `mask` of the attention is True for the keys that a query attends to; it broadcasts to (B, H, N, N).
        """
        if self.rel_pos_bias is not None:
            mask = join_masks(mask, self.rel_pos_bias(grid))
        *body, last = self.blocks
        for block in body:
            x = block(x, grid, None, mask)
        return last(x, grid, queries if mask is None else None, mask)[:, :queries]

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for `tokens`: (B, N, D) → (B, classes)."""
        return self.head(tokens[:, 0] if self.config.pool == "class" else self.fc_norm(tokens[:, 1:].mean(1)))


class OffsetAttention(SelfAttention):
    """Self-attention with a bias by offset, if it has a table of its own; k has no bias: (B, N, D) → (B, N, D)."""

    def __init__(
        self, width: int, heads: int, position_bias: "ClassOffsetBias | None", *, dropout: float = 0.0
    ) -> None:
        super().__init__(width, heads, bias=False, dropout=dropout)
        self.qkv = KeylessBiasLinear(width)
        self.position_bias = position_bias

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        q, k, v, _ = super().project(x)
        if self.position_bias is not None:
            if grid is None or grid[0] * grid[1] != x.shape[1] - 1:
                raise ConfigError(f"grid {grid} for {x.shape[1]} tokens; expected (rows, columns) of one token less")
            mask = join_masks(mask, self.position_bias(grid))
        return q[:, :, :queries], k, v, None if mask is None else mask[..., :queries, :]


class ClassOffsetBias(nn.Module):
    """A learned bias of the attention per head and offset, query − key, and three that the class token takes part in.

    They are the first rows of the table: from the class token to patches, from patches to it, and to itself.
    """

    def __init__(self, heads: int, grid: Grid) -> None:
        super().__init__()
        self.span = (2 * grid[0] - 1, 2 * grid[1] - 1)  # offsets 1 − n … n − 1 along each axis
        self.offsets = nn.Parameter(torch.empty(1, 3 + self.span[0] * self.span[1], heads))

    def forward(self, grid: Grid) -> Tensor:
        """For all pairs of tokens: (1, H, N, N)."""
        span = (2 * grid[0] - 1, 2 * grid[1] - 1)
        table = resample(self.offsets, self.span, span)[0].T  # (H, 3 + R)
        rows, columns = (torch.arange(side, device=table.device) for side in grid)
        place = (rows[:, None] * span[1] + columns).flatten()  # of each patch, in the table's row length
        index = place[:, None] - place + 3 + span[0] * span[1] // 2  # (n, n)
        from_class = F.pad(torch.zeros_like(place), (1, 0), value=2)  # (N,)
        index = torch.cat((from_class[None], F.pad(index, (1, 0), value=1)))
        return table.index_select(1, index.flatten()).unflatten(1, index.shape)[None]


BASE, LARGE = BeitConfig(), BeitConfig(width=1024, depth=24, heads=16)
PRESETS = Presets(
    lambda: {
        **{f"beit_base_patch16_{px}": replace(BASE, image_size=px, layer_scale=0.1) for px in (224, 384)},
        **{f"beit_large_patch16_{px}": replace(LARGE, image_size=px) for px in (224, 384, 512)},
        "beitv2_base_patch16_224": BASE,
        "beitv2_large_patch16_224": LARGE,
    }
)
ALIASES = {
    **{f"BEiT-B/16{'' if px == 224 else f'@{px}'}": f"beit_base_patch16_{px}" for px in (224, 384)},
    **{f"BEiT-L/16{'' if px == 224 else f'@{px}'}": f"beit_large_patch16_{px}" for px in (224, 384, 512)},
    "BEiTv2-B/16": "beitv2_base_patch16_224",
    "BEiTv2-L/16": "beitv2_large_patch16_224",
}

TABLE, SHARED_TABLE = "blocks.#.attn.position_bias.offsets", "rel_pos_bias.offsets"


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """The table determines the number of heads and, for a square, the grid."""
    fields, shared = encoder_names.infer_encoder_fields(shapes), SHARED_TABLE in shapes
    _, rows, heads = side.get_shape(shapes, SHARED_TABLE if shared else TABLE.replace("#", "0"), 3)
    span = math.isqrt(max(rows - 3, 0))
    square = span * span == rows - 3 and span % 2 == 1
    fields |= {
        "image_size": tuple((span + 1) // 2 * pixels for pixels in fields["patch_size"]) if square else None,
        "heads": heads,
        "shared_bias": shared,
        "pool": "mean_norm" if "fc_norm.weight" in shapes else "class",
    }
    return side.InferredConfig(fields=fields)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = encoder_names.make_timm_arguments(config) | {
        "use_rel_pos_bias": not config["shared_bias"],
        "use_shared_rel_pos_bias": config["shared_bias"],
        "global_pool": encoder_names.TIMM_POOLS[config["pool"]],
    }
    return encoder_names.make_timm_card(config, "beit_base_patch16_224", arguments)


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    return hf_names.make_hf_vit_card(config, "beit", "Beit") | {
        "use_relative_position_bias": not config["shared_bias"],
        "use_shared_relative_position_bias": config["shared_bias"],
        "use_mean_pooling": config["pool"] == "mean_norm",
        "layer_scale_init_value": config["layer_scale"] or 0.0,
        "drop_path_rate": config["stochastic_depth"],
    }


# theirs: (R + 3, H), the three rows of the class token last
CLASS_ROWS_FIRST = side.TensorTransform(
    lambda parts: parts[0].roll(3, 0)[None], lambda table, _: [table[0].roll(-3, 0)]
)
THEIR_TABLE = "relative_position_bias_table"
TIMM_TABLE = side.parse_table(
    """
    cls_token
    {patch_embed.proj,norm,fc_norm,head}.*
    blocks.#.:
        {norm1,attn.qkv,attn.proj,norm2,mlp.fc#}.*
        gamma_{1,2} -> ls{1,2}.gamma
        attn.[q_bias,v_bias] -> attn.qkv.qv_bias
        attn.relative_position_bias_table -> attn.position_bias.offsets | rolled
    rel_pos_bias.relative_position_bias_table -> rel_pos_bias.offsets | rolled
    """,
    rolled=CLASS_ROWS_FIRST,
)
SIMMIM_TABLE = tuple(replace(row, theirs=tuple(f"encoder.{name}" for name in row.theirs)) for row in TIMM_TABLE)
OLD, NEW = hf_names.HF_OLD_LAYER, hf_names.HF_NEW_LAYER
# with the names on disk and, since v5, in memory
HF_TABLE = """
    embeddings.cls_token -> cls_token
    {embeddings.patch_embeddings.projection,pooler.layernorm,layernorm}.* -> {patch_embed.proj,fc_norm,norm}.*
    classifier.* -> head.*
    {encoder.relative_position_bias,shared_position_bias}. -> rel_pos_bias.:
        relative_position_bias_table -> offsets | rolled
    {encoder.layer.#,layers.#}. -> blocks.#.:
        {layernorm_before,layernorm_after}.* -> {norm1,norm2}.*
        lambda_{1,2} -> ls{1,2}.gamma
    encoder.layer.#. -> blocks.#.:
        attention.attention.[query,key,value].weight -> attn.qkv.weight
        attention.attention.[query,value].bias -> attn.qkv.qv_bias
        attention.output.dense.* -> attn.proj.*
        attention.attention.relative_position_bias.relative_position_bias_table -> attn.position_bias.offsets | rolled
        {intermediate,output}.dense.* -> mlp.{fc1,fc2}.*
    layers.#. -> blocks.#.:
        attention.[q,k,v]_proj.weight -> attn.qkv.weight
        attention.[q,v]_proj.bias -> attn.qkv.qv_bias
        attention.o_proj.* -> attn.proj.*
        relative_position_bias.relative_position_bias_table -> attn.position_bias.offsets | rolled
        mlp.fc#.*
"""
PRETRAINING = r".*relative_position_index|(encoder\.)?mask_token|(lm_head|cls_pt_layers|decoder)\..*"  # not used here


def make_timm_source(table: str) -> side.SourceNames:
    """timm's names are also those of the authors' files, of fine-tuned and pre-trained models."""
    return side.SourceNames(
        layout="timm",
        table=TIMM_TABLE,
        markers=(encoder_names.PATCH_KERNEL, table),
        assumed={"norm_eps": 1e-6},
        card=make_timm_card,
        details={"only_in_timm": True, "ignored": PRETRAINING},
    )


def make_hf_source(layer: str) -> side.SourceNames:
    return side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE, rolled=CLASS_ROWS_FIRST),
        markers=(hf_names.HF_KERNEL, f"{layer}lambda_1"),
        card=make_hf_card,
        details={"model_type": "beit", "norm_eps": 1e-12, "ignored": PRETRAINING},
    )


SIMMIM = side.SourceNames(
    layout="authors",
    table=SIMMIM_TABLE,
    markers=(f"encoder.{encoder_names.PATCH_KERNEL}", f"encoder.rel_pos_bias.{THEIR_TABLE}"),
    supported={"shared_bias": (True,), "classes": (0,), "pool": ("class",)},
    assumed={"norm_eps": 1e-6},
    details={"wrapper": "model", "ignored": PRETRAINING},
)
SOURCES = (
    make_timm_source(f"blocks.0.attn.{THEIR_TABLE}"),
    make_timm_source(f"rel_pos_bias.{THEIR_TABLE}"),
    make_hf_source(OLD),
    make_hf_source(NEW),
    SIMMIM,
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("beit", BeitConfig, Beit, PRESETS, ALIASES, CHECKPOINT)
