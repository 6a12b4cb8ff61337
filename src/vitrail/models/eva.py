"""DINOv3 (Siméoni 2025, arXiv 2508.10104) and EVA-02 (Fang 2023, arXiv 2303.11331): ViTs with rotary positions.

Queries and keys of the patches are rotated by angles proportional to their rows and columns, so that a score depends on
the offset of two patches. DINOv3 has no other positions and takes images of any size; EVA-02 also adds a table.
B batch, E prefix tokens, n = h·w patches, N = E + n tokens, D width, H heads, K width of a head.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention
from vitrail.layers.block import SwiGlu
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample, rotate
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, pair
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_scaled_layers
from vitrail.models.names import encoder_names
from vitrail.models.names.hf_names import make_hf_card
from vitrail.models.parts.attention import QV_IN_QKV, KeylessBiasLinear
from vitrail.models.parts.encoder import EncoderConfig, make_encoder_blocks, make_head, prepend_tokens, zero_head

INDEXED_GRID = 16  # rows and columns of EVA-02 in pre-training, which places of other grids are scaled to


@dataclass(frozen=True, kw_only=True)
class EvaConfig(EncoderConfig):
    image_size: Size = 256  # rows, columns; one number for a square
    activation: Literal["gelu", "swiglu"] = "gelu"
    mlp_norm: bool = False  # a norm before the last map of a SwiGLU, as in the larger EVA-02
    qv_bias: bool = False  # biases of queries and values; keys have none
    layer_scale: float | None = 1e-5  # the factor that a block's branches start with; none: no factor
    registers: int = field(default=4, metadata=MAY_BE_ZERO)  # extra tokens without a patch (Darcet 2023)
    rotary: Literal["centered", "indexed", "none"] = "centered"  # DINOv3's, EVA-02's, or none as in EVA
    positions: Literal["none", "learned"] = "none"  # learned: a table is added too
    pool: Literal["class", "mean", "mean_norm"] = "mean"  # mean_norm: the final norm after the mean of the patches
    norm_eps: float = 1e-5  # EVA-02: 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp_norm and self.activation != "swiglu":
            raise ConfigError(f"mlp_norm requires activation='swiglu', not {self.activation!r}")
        if self.rotary != "none" and self.width % (4 * self.heads):
            raise ConfigError(f"width {self.width}; expected a multiple of {4 * self.heads} for rotary positions")


class Eva(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: EvaConfig
    first_filters = "patch_embed.proj.weight"
    takes_mask = True

    def __init__(self, config: EvaConfig) -> None:
        super().__init__(config)
        width, eps, mlp_width = config.width, config.norm_eps, config.mlp_width or 4 * config.width
        patch = pair(config.patch_size)
        self.declare_level(patch)
        self.prefix_tokens = ("class", *(f"register{number}" for number in range(config.registers)))
        self.classifier_tokens = ("class",) if config.pool == "class" else ()
        self.classifiers = ((config.pool.removesuffix("_norm"), "head"),) if config.classes else ()
        if config.rotary != "none":
            self.no_dropping_reason = "rotary positions need the position of every token"
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.reg_token = nn.Parameter(torch.empty(1, config.registers, width)) if config.registers else None
        rows = self.prefix + math.prod(self.grid)
        self.pos_embed = nn.Parameter(torch.empty(1, rows, width)) if config.positions == "learned" else None
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_encoder_blocks(
            config, mlp_width, activation=config.activation, layer_scale=config.layer_scale
        )
        for block in self.blocks:
            rotation = None if config.rotary == "none" else Rotation(width // config.heads, config.rotary)
            dropout = config.attention_dropout
            block.attn = RotaryAttention(width, config.heads, rotation, qv_bias=config.qv_bias, dropout=dropout)
            if config.mlp_norm:
                block.mlp = NormedSwiGlu(width, mlp_width, norm_eps=eps, dropout=config.dropout)
        self.norm = nn.Identity() if config.pool == "mean_norm" else nn.LayerNorm(width, eps)
        self.fc_norm = nn.LayerNorm(width, eps) if config.pool == "mean_norm" else nn.Identity()
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in EVA-02's code; the head is zero."""
        init_scaled_layers(self, self.blocks)
        for table in (self.cls_token, self.reg_token, self.pos_embed):
            if table is not None:
                nn.init.trunc_normal_(table, std=0.02)
        zero_head(self.head)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        x, table = prepend_tokens(patches, self.cls_token, self.reg_token), self.tables(grid)
        return self.pos_drop(x if table is None else x + table)

    def tables(self, grid: Grid) -> Tensor | None:
        return None if self.pos_embed is None else resample(self.pos_embed, self.grid, grid)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None, mask: Tensor | None = None) -> Tensor:
        """All blocks; with `queries`, the last one computes only the first `queries` tokens: (B, N, D).

        The `mask` of the attention is True for the keys that a query attends to; it broadcasts to (B, H, N, N).
        """
        *body, last = self.blocks
        for block in body:
            x = block(x, grid, None, mask)
        return last(x, grid, queries, mask)

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for `tokens`: (B, N, D) → (B, classes)."""
        return self.head(
            tokens[:, 0] if self.config.pool == "class" else self.fc_norm(tokens[:, self.prefix :].mean(1))
        )


class RotaryAttention(SelfAttention):
    """Self-attention whose queries and keys are rotated; keys have no bias: (B, N, D) → (B, N, D)."""

    def __init__(
        self, width: int, heads: int, rotation: "Rotation | None", *, qv_bias: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(width, heads, bias=False, dropout=dropout)
        self.rotation = rotation
        if qv_bias:
            self.qkv = KeylessBiasLinear(width)

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        q, k, v, _ = super().project(x)
        if self.rotation is not None:
            if grid is None or grid[0] * grid[1] > x.shape[1]:
                raise ConfigError(f"grid {grid} for {x.shape[1]} tokens; expected (rows, columns) of no more tokens")
            q, k = self.rotation(q, k, grid)
        return q[:, :, :queries], k, v, None if mask is None else mask[..., :queries, :]


class Rotation(nn.Module):
    """Rotates pairs of coordinates of q and k by the rows of the patches, then as many by the columns.

    centered: places are those of the patches' centers from −2π to 2π, and coordinate i is paired with i + K/2.
    indexed: places are counted from 0, scaled to 16 rows and columns, and coordinate 2i is paired with 2i + 1.
    """

    def __init__(self, head_width: int, kind: Literal["centered", "indexed"]) -> None:
        super().__init__()
        self.head_width, self.kind = head_width, kind
        self.base = 100.0 if kind == "centered" else 10_000.0

    def locate(self, count: int, device: torch.device) -> Tensor:
        """The places of `count` patches along an axis."""
        numbers = torch.arange(count, device=device).float()
        if self.kind == "centered":
            return 2 * math.pi * ((2 * numbers + 1) / count - 1)
        return numbers * (INDEXED_GRID / count)

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_width, 4, device=q.device).float()
        rates = self.base ** (-steps / self.head_width)  # base^(−4i/K)
        rows, columns = (self.locate(count, q.device)[:, None] * rates for count in grid)
        rows, columns = rows[:, None].expand(-1, grid[1], -1), columns.expand(grid[0], -1, -1)  # (h, w, K/4)
        angles = torch.cat((rows, columns), dim=-1).flatten(0, 1)  # (n, K/2)
        angles = F.pad(angles, (0, 0, k.shape[2] - angles.shape[0], 0))  # angle 0: prefix tokens are not rotated
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        turn = rotate if self.kind == "centered" else rotate_neighbors
        return turn(q, cos, sin), turn(k, cos, sin)


def rotate_neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of coordinates (2i, 2i + 1) by its token's angle: (B, H, N, K)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class NormedSwiGlu(SwiGlu):
    """fc2(LN(SiLU(a)·b)), where a and b are the halves of fc1(x): (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, hidden: int, *, norm_eps: float, dropout: float = 0.0) -> None:
        super().__init__(width, hidden, dropout=dropout)
        self.norm = nn.LayerNorm(hidden, norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.norm(self.drop(F.silu(a) * b))))


DINO = EvaConfig(classes=0)
DINOV3 = {
    "tiny": replace(DINO, width=192, heads=3),
    "small": replace(DINO, width=384, heads=6),
    "small_plus": replace(DINO, width=384, heads=6, activation="swiglu"),
    "base": DINO,
    "large": replace(DINO, width=1024, depth=24, heads=16),
    "huge_plus": replace(DINO, width=1280, depth=32, heads=20, activation="swiglu"),
    "7b": replace(DINO, width=4096, depth=40, heads=32, mlp_width=8192, activation="swiglu"),
}
EVA02_BASE = EvaConfig(
    image_size=448,
    patch_size=14,
    mlp_width=2048,
    activation="swiglu",
    mlp_norm=True,
    qv_bias=True,
    layer_scale=None,
    registers=0,
    rotary="indexed",
    positions="learned",
    pool="mean_norm",
    norm_eps=1e-6,
)
EVA02 = {
    "tiny": replace(EVA02_BASE, width=192, heads=3, mlp_width=512, mlp_norm=False),
    "small": replace(EVA02_BASE, width=384, heads=6, mlp_width=1024, mlp_norm=False),
    "base": EVA02_BASE,
    "large": replace(EVA02_BASE, width=1024, depth=24, heads=16, mlp_width=2730),
}
TUNED = {"tiny": 336, "small": 336, "base": 448, "large": 448}  # image sizes
PRESETS = Presets(
    lambda: {
        **{f"vit_{size}_patch16_dinov3": config for size, config in DINOV3.items() if size != "tiny"},
        **{f"vit_{s}_patch16_dinov3_qkvb": replace(config, qv_bias=True) for s, config in DINOV3.items() if s != "7b"},
        **{f"eva02_{size}_patch14_224": replace(config, image_size=224, classes=0) for size, config in EVA02.items()},
        **{f"eva02_{size}_patch14_{px}": replace(EVA02[size], image_size=px) for size, px in TUNED.items()},
    }
)
LETTERS = {"tiny": "Ti", "small": "S", "small_plus": "S+", "base": "B", "large": "L", "huge_plus": "H+", "7b": "7B"}
ALIASES = {
    **{f"DINOv3-{LETTERS[size]}/16": f"vit_{size}_patch16_dinov3" for size in DINOV3 if size != "tiny"},
    **{f"EVA-02-{LETTERS[size]}/14": f"eva02_{size}_patch14_224" for size in EVA02},
    **{f"EVA-02-{LETTERS[size]}/14@{px}": f"eva02_{size}_patch14_{px}" for size, px in TUNED.items()},
}

DEFAULT_GRID = 16  # rows and columns of patches in images of a model without a table, which fits any size
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 20, 4096: 32}  # of DINOv3
CLIP_MEAN_STD = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}  # of EVA-02
UNUSED = r".*(rope_embed\.periods|\.bias_mask)|mask_token|local_cls_norm\..*|projectors\..*"  # of training, or computed


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """EVA-02 has a table and SwiGLU, EVA a table only, DINOv3 no table."""
    fields = encoder_names.infer_encoder_fields(shapes)
    registers = side.get_shape(shapes, "reg_token", 3)[1] if "reg_token" in shapes else 0
    swiglu = shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    table = "pos_embed" in shapes
    fields |= {
        "activation": "swiglu" if swiglu else "gelu",
        "mlp_norm": "blocks.0.mlp.norm.weight" in shapes,
        "qv_bias": "blocks.0.attn.qkv.qv_bias" in shapes,
        "registers": registers,
        "rotary": "centered" if not table else "indexed" if swiglu else "none",
        "positions": "learned" if table else "none",
        "pool": "mean_norm" if "fc_norm.weight" in shapes else "mean",
        "norm_eps": 1e-6 if table else 1e-5,
    }
    if table:
        return side.InferredConfig(fields=fields, stride=fields["patch_size"], prefix=1 + registers)
    fields["image_size"] = tuple(DEFAULT_GRID * pixels for pixels in fields["patch_size"])
    return side.InferredConfig(fields=fields)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    """The arguments of timm's Eva; its DINOv3 and EVA-02 differ in all of them."""
    hidden, centered = config["mlp_width"] or 4 * config["width"], config["rotary"] == "centered"
    arguments = encoder_names.make_timm_arguments(config) | {
        "mlp_ratio": (hidden + 0.5) / config["width"],
        "qkv_bias": config["qv_bias"],
        "qkv_fused": not config["mlp_norm"],
        "swiglu_mlp": config["activation"] == "swiglu",
        "swiglu_align_to": int(centered and config["activation"] == "swiglu"),
        "scale_mlp": config["mlp_norm"],
        "num_reg_tokens": config["registers"],
        "use_abs_pos_emb": config["positions"] == "learned",
        "use_rot_pos_emb": config["rotary"] != "none",
        "rope_type": "dinov3" if centered else "cat",
        "rope_temperature": 100.0 if centered else 10000.0,
        "rope_rotate_half": centered,
        "global_pool": encoder_names.TIMM_POOLS[config["pool"]],
        "use_fc_norm": config["pool"] == "mean_norm",
        "dynamic_img_size": False,
    }
    # any model with the same norms, which the arguments cannot set
    name = "vit_small_patch16_dinov3" if config["norm_eps"] == 1e-5 else "eva02_tiny_patch14_224"
    arguments |= {} if centered else {"ref_feat_shape": [DEFAULT_GRID, DEFAULT_GRID]}
    return encoder_names.make_timm_card(config, name, arguments)


def make_dinov3_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    swiglu = config["activation"] == "swiglu"
    return make_hf_card({**config, "activation": "gelu"}, "dinov3_vit", "DINOv3ViT") | {
        "hidden_act": "silu" if swiglu else "gelu",
        "intermediate_size": config["mlp_width"] or 4 * config["width"],
        "use_gated_mlp": swiglu,
        "num_register_tokens": config["registers"],
        "query_bias": True,
        "value_bias": True,
        "layerscale_value": config["layer_scale"],
        "rope_theta": 100.0,
    }


TIMM_TABLE = """
    {cls_token,reg_token,pos_embed}
    {patch_embed.proj,norm,fc_norm,head}.*
    blocks.#.{norm1,norm2,attn.proj,mlp.norm,mlp.fc2}.*
    blocks.#.gamma_{1,2} -> blocks.#.ls{1,2}.gamma
"""
FUSED = """
    blocks.#.attn.qkv.weight
    blocks.#.attn.[q_bias,v_bias] -> blocks.#.attn.qkv.qv_bias
"""
SEPARATE = """
    blocks.#.attn.[q,k,v]_proj.weight -> blocks.#.attn.qkv.weight
    blocks.#.attn.[q,v]_proj.bias -> blocks.#.attn.qkv.qv_bias
"""
PACKED = "    blocks.#.mlp.fc1.*"
GATED = "    blocks.#.mlp.[fc1_g,fc1_x].* -> blocks.#.mlp.fc1.*"


def is_gated(config: side.ConfigFields) -> bool:
    """Whether both halves of a SwiGLU's first map have their own names in timm: not in the small EVA-02."""
    return config["activation"] == "swiglu" and (config["mlp_norm"] or config["rotary"] == "centered")


def make_timm_source(*markers: str, gated: bool, separate: bool = False) -> side.SourceNames:
    return side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE + (SEPARATE if separate else FUSED) + (GATED if gated else PACKED)),
        markers=(encoder_names.PATCH_KERNEL, *markers),
        accepts=lambda config: is_gated(config) == gated and config["mlp_norm"] == separate,
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "ignored": UNUSED,
            "pretrained_cfg": {"crop_pct": 1.0, **(CLIP_MEAN_STD if "pos_embed" in markers else {})},
        },
    )


# with the names on disk, then those in memory
HF_TABLE = """
    norm.*
    embeddings.{cls_token,register_tokens,patch_embeddings.*} -> {cls_token,reg_token,patch_embed.proj.*}
    {,model.}layer.#. -> blocks.#.:
        {norm1,norm2}.*
        layer_scale{1,2}.lambda1 -> ls{1,2}.gamma
        attention.[q,k,v]_proj.weight -> attn.qkv.weight
        attention.[q,v]_proj.bias -> attn.qkv.qv_bias
        {attention.o_proj,mlp.down_proj}.* -> {attn.proj,mlp.fc2}.*
"""
HF_PACKED = "        mlp.up_proj.* -> mlp.fc1.*"
HF_GATED = "        mlp.[gate,up]_proj.* -> mlp.fc1.*"
FACEBOOK_TABLE = """
    {storage_tokens,cls_token} -> {reg_token,cls_token}
    {patch_embed.proj,norm}.*
    blocks.#.:
        {norm1,norm2,attn.proj}.*
        ls{1,2}.gamma
        attn.qkv.weight
        attn.qkv.bias -> attn.qkv.qv_bias | without_keys
"""
FACEBOOK_PACKED = "        mlp.{fc1,fc2}.*"
FACEBOOK_GATED = "        mlp.{[w1,w2],w3}.* -> mlp.{fc1,fc2}.*"
DINOV3_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "classes": (0,),
    "rotary": ("centered",),
    "positions": ("none",),
    "qv_bias": (True,),
    "pool": ("class",),
}


def make_hf_source(*markers: str, gated: bool) -> side.SourceNames:
    return side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE + (HF_GATED if gated else HF_PACKED)),
        markers=("embeddings.patch_embeddings.weight", "embeddings.register_tokens", *markers),
        accepts=lambda config: (config["activation"] == "swiglu") == gated,
        supported=DINOV3_SUPPORTED,
        card=make_dinov3_hf_card,
        details={"model_type": "dinov3_vit", "norm_eps": 1e-5, "imagenet_mean": True, "fields": {"pool": "class"}},
    )


def make_facebook_source(*markers: str, gated: bool) -> side.SourceNames:
    """The files of DINOv3, whose SwiGLU is as in its code: w1, w2 and w3."""
    return side.SourceNames(
        layout="authors",
        table=side.parse_table(FACEBOOK_TABLE + (FACEBOOK_GATED if gated else FACEBOOK_PACKED), without_keys=QV_IN_QKV),
        markers=(encoder_names.PATCH_KERNEL, "storage_tokens", *markers),
        accepts=lambda config: (config["activation"] == "swiglu") == gated,
        supported=DINOV3_SUPPORTED,
        assumed={"norm_eps": 1e-5},
        heads=HEADS,
        details={
            "kernel": encoder_names.PATCH_KERNEL,
            "wrapper": "",
            "ignored": UNUSED,
            "fields": {"pool": "class"},
            "preprocessing": {"crop": 1.0},
        },
    )


SOURCES = (
    make_timm_source("reg_token", "blocks.0.gamma_1", gated=False),  # DINOv3
    make_timm_source("reg_token", "blocks.0.gamma_1", "blocks.0.mlp.fc1_g.weight", gated=True),
    make_timm_source("pos_embed", "blocks.0.attn.q_bias", gated=False),  # EVA-02
    make_timm_source(
        "pos_embed", "blocks.0.attn.q_proj.weight", "blocks.0.mlp.fc1_g.weight", gated=True, separate=True
    ),
    make_hf_source(gated=False),
    *(make_hf_source(f"{layer}.0.mlp.gate_proj.weight", gated=True) for layer in ("layer", "model.layer")),
    make_facebook_source(gated=False),
    make_facebook_source("blocks.0.mlp.w1.weight", gated=True),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("eva", EvaConfig, Eva, PRESETS, ALIASES, CHECKPOINT)
