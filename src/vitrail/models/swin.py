"""Swin (Liu 2021, arXiv 2103.14030) and Swin-V2 (Liu 2021, arXiv 2111.09883): attention within windows that shift.

B batch, n = h·w tokens, D width, H heads, K width of a head, r×c tokens of a window; h, w and D change by stage. Every
second block shifts its windows by half their size. Maps that are not made of whole windows are padded with zeros, as in
torchvision and transformers; timm shifts before it pads, so that its outputs differ for such sizes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.attention import Mask, Projected
from vitrail.layers.block import Block
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import Level, make_patch_sizes
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_small_linear
from vitrail.models.names.hf_names import make_hf_heading
from vitrail.models.parts.attention import QV_IN_QKV, KeylessBiasLinear
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import StagedModel, check_stages, make_halved_levels, make_stage_blocks, name_blocks
from vitrail.models.parts.windows import (
    OFFSETS_BY_QUERY,
    OffsetBias,
    WindowAttention,
    check_windows,
    init_offset_biases,
    look_up_offsets,
)

NORM_EPS = 1e-5
BIAS_WIDTH = 512  # of the MLP that computes the biases of Swin-V2
MAX_BIAS = 16.0


@dataclass(frozen=True, kw_only=True)
class SwinConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 4
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    version: Literal[1, 2] = 1  # 2: cosine attention, computed biases, norms after the branches
    stages: tuple[int, ...] = (2, 2, 6, 2)  # blocks per stage; each stage but the first halves the grid
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels of a token, per stage
    heads: tuple[int, ...] = (3, 6, 12, 24)  # attention heads per stage, each width / heads wide
    windows: int | tuple[int, ...] = 7  # rows and columns of a window, per stage or one number for all
    trained_windows: tuple[int, ...] | None = None  # of version 2 in pre-training, which scale offsets; none: `windows`
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    dynamic: bool = False  # accept any multiple of the patch size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        windows = (self.windows,) * len(self.stages) if isinstance(self.windows, int) else self.windows
        object.__setattr__(self, "windows", windows)
        check_stages(self, "windows", *(() if self.trained_windows is None else ("trained_windows",)))
        if self.trained_windows is not None and self.version == 1:
            raise ConfigError("trained_windows of a Swin of version 1, whose biases are a table; expected none")
        patch = pair(self.patch_size)
        if self.version == 1:  # a file of version 2 fits any window, and does not say which it was trained with
            check_windows(windows, pair(self.image_size), patch, patch)
        check_grid(pair(self.image_size), patch)


class Swin(StagedModel):
    """Attention within windows, which every second block shifts by half a window."""

    config: SwinConfig
    first_filters = "patch_embed.proj.weight"

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        patch = pair(config.patch_size)
        self.levels = make_levels(config)
        self.sizes = make_patch_sizes(patch, dynamic=config.dynamic)
        self.classifiers = (("mean", "head"),) if config.classes else ()
        self.patch_embed = PatchEmbed(config.widths[0], patch, config.channels)
        self.patch_norm = nn.LayerNorm(config.widths[0], NORM_EPS)
        self.pos_drop = nn.Dropout(config.dropout)
        self.layers, kind = nn.ModuleList(), Block if config.version == 1 else PostNormBlock
        for stage, level in enumerate(self.levels):
            hidden, make = round(config.mlp_ratio * level.width), partial(make_attention, config, stage, level.grid)
            blocks = make_stage_blocks(config, stage, hidden, make, norm_eps=NORM_EPS, kind=kind)
            merge = PatchMerge(config.widths[stage - 1], level.width, norm_first=config.version == 1) if stage else None
            self.layers.append(SwinStage(merge, blocks))
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code: version 2 starts as the identity, since its last norms are zero; so is the head."""
        init_small_linear(self)
        init_offset_biases(self)
        for module in self.modules():
            if isinstance(module, CosineAttention):
                nn.init.constant_(module.logit_scale, math.log(10))
                nn.init.zeros_(module.qkv.get_parameter("qv_bias"))
            elif isinstance(module, PostNormBlock):
                nn.init.zeros_(module.norm1.weight)
                nn.init.zeros_(module.norm2.weight)
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return self.patch_norm(self.patch_embed(images)), grid

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002  # each attention adds its own
        return self.pos_drop(patches)

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        for stage in self.layers:
            x, grid = stage(x, grid)
            yield x, grid


def make_levels(config: SwinConfig) -> tuple[Level, ...]:
    stride, blocks = pair(config.patch_size), name_blocks(config.stages, "layers.{}.blocks.{}")
    return make_halved_levels(check_grid(pair(config.image_size), stride), stride, config.widths, blocks)


def make_attention(config: SwinConfig, stage: int, grid: Grid, number: int) -> WindowAttention:
    """The attention of a block of a stage; a window larger than the grid shrinks to it."""
    assert isinstance(config.windows, tuple)
    width, heads, shifted = config.widths[stage], config.heads[stage], number % 2 == 1
    window = (min(config.windows[stage], grid[0]), min(config.windows[stage], grid[1]))
    if config.version == 1:
        bias = OffsetBias(heads, window)
        return WindowAttention(width, heads, window, bias, shifted=shifted, dropout=config.attention_dropout)
    trained = window if config.trained_windows is None else pair(config.trained_windows[stage])
    bias = LogOffsetBias(heads, trained)
    return CosineAttention(width, heads, window, bias, shifted=shifted, dropout=config.attention_dropout)


class SwinStage(nn.Module):
    """Merges 2×2 tokens, then blocks: (B, n, D) and the grid → the same at half the size."""

    def __init__(self, downsample: "PatchMerge | None", blocks: nn.ModuleList) -> None:
        super().__init__()
        self.downsample, self.blocks = downsample, blocks

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        if self.downsample is not None:
            x, grid = self.downsample(x, grid)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class PatchMerge(nn.Module):
    """A linear map of 2×2 neighbors; an odd grid is padded with zeros."""

    def __init__(self, width: int, out_width: int, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm = nn.LayerNorm(4 * width if norm_first else out_width, NORM_EPS)
        self.reduction = nn.Linear(4 * width, out_width, bias=False)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        x = x.unflatten(1, grid)
        if grid[0] % 2 or grid[1] % 2:
            x = F.pad(x, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        x = (
            x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5)
        )  # (B, h/2, w/2, 2 columns, 2 rows, D)
        half = (x.shape[1], x.shape[2])
        x = x.flatten(3).flatten(1, 2)
        return self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x)), half


class PostNormBlock(Block):
    """z' = LN(MSA(z)) + z; z = LN(MLP(z')) + z', so that the residual stream grows slowly with depth."""

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.norm1(self.drop(self.attn(x, grid, mask, queries))))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class CosineAttention(WindowAttention):
    """Attention within windows by the cosine of q and k times a learned factor of at most 100; k has no bias."""

    def __init__(
        self, width: int, heads: int, window: Grid, position_bias: nn.Module, *, shifted: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(width, heads, window, position_bias, shifted=shifted, bias=False, dropout=dropout)
        self.qkv = KeylessBiasLinear(width)
        self.logit_scale = nn.Parameter(torch.empty(heads, 1, 1))  # its logarithm

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        q, k, v, mask = super().project(x, grid, mask, queries)
        scale = self.logit_scale.clamp(max=math.log(100)).exp() * math.sqrt(q.shape[-1])  # attention divides by √K
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v, mask


class LogOffsetBias(nn.Module):
    """The bias of each offset computed by an MLP from its logarithm, so that it extends to larger windows."""

    def __init__(self, heads: int, trained: Grid) -> None:
        super().__init__()
        self.trained = trained  # rows and columns of the window that scales the offsets
        self.mlp = nn.Sequential(nn.Linear(2, BIAS_WIDTH), nn.ReLU(), nn.Linear(BIAS_WIDTH, heads, bias=False))

    def forward(self, size: Grid) -> Tensor:
        """For all pairs of tokens of a window: (H, r·c, r·c)."""
        weight = self.mlp[0].get_parameter("weight")
        rows, columns = (
            torch.arange(side - 1, -side, -1, device=weight.device) * (8 / max(trained - 1, 1))
            for side, trained in zip(size, self.trained, strict=True)
        )  # query − key
        offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)  # (2r−1, 2c−1, 2)
        offsets = offsets.sign() * (offsets.abs() + 1).log2() / 3
        table = MAX_BIAS * self.mlp(offsets.to(weight.dtype)).sigmoid()
        return look_up_offsets(table.permute(2, 0, 1), size)


SIZES = {
    "tiny": SwinConfig(),
    "small": SwinConfig(stages=(2, 2, 18, 2)),
    "base": SwinConfig(stages=(2, 2, 18, 2), widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32)),
    "large": SwinConfig(stages=(2, 2, 18, 2), widths=(192, 384, 768, 1536), heads=(6, 12, 24, 48)),
}
LARGER = [(size, window, pixels) for size in ("base", "large") for window, pixels in ((16, 256), (24, 384))]


def configure_v2(size: str, window: int, pixels: int, trained: tuple[int, ...] | None = None) -> SwinConfig:
    return replace(SIZES[size], version=2, windows=window, image_size=pixels, trained_windows=trained)


PRESETS = Presets(
    lambda: {
        **{f"swin_{size}_patch4_window7_224": config for size, config in SIZES.items()},
        **{f"swin_{s}_patch4_window12_384": replace(SIZES[s], windows=12, image_size=384) for s in ("base", "large")},
        "swin_s3_tiny_224": replace(SIZES["tiny"], windows=(7, 7, 14, 7)),  # windows found by a search (Chen 2021)
        "swin_s3_small_224": replace(SIZES["small"], windows=(14, 14, 14, 7)),
        "swin_s3_base_224": replace(SIZES["small"], stages=(2, 2, 30, 2), windows=(7, 7, 14, 7)),
        **{f"swinv2_{s}_window{w}_256": configure_v2(s, w, 256) for s in ("tiny", "small", "base") for w in (8, 16)},
        **{f"swinv2_{s}_window12_192": configure_v2(s, 12, 192) for s in ("base", "large")},
        **{f"swinv2_{s}_window12to{w}_192to{px}": configure_v2(s, w, px, (12, 12, 12, 6)) for s, w, px in LARGER},
    }
)
ALIASES = {
    **{f"Swin-{size[0].upper()}": f"swin_{size}_patch4_window7_224" for size in SIZES},
    **{f"Swin-{size[0].upper()}@384": f"swin_{size}_patch4_window12_384" for size in ("base", "large")},
    **{f"SwinV2-{s[0].upper()}/{w}": f"swinv2_{s}_window{w}_256" for s in ("tiny", "small", "base") for w in (8, 16)},
}

TABLE = "attn.position_bias.table"
DEFAULT_WINDOW = {1: 7, 2: 8}  # by version; the weights of version 2 fit any window
COMPUTED = r".*\.(relative_position_index|relative_coords_table|attn_mask)"  # tensors that follow from the config
MAX_STAGES = 4  # of torchvision's names, which count stages and what is between them together


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Version 1 has a table of offsets in each window; of version 2, the size of the windows is not in the weights."""
    width, channels, *patch = side.get_shape(shapes, "patch_embed.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"layers\.(\d+)\.", r"layers\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"layers.{stage}.blocks.0." for stage in range(len(stages))]
    version = 2 if f"{first[0]}attn.logit_scale" in shapes else 1
    tables = [side.get_shape(shapes, f"{name}{TABLE}", 3) for name in first] if version == 1 else []
    scales = [side.get_shape(shapes, f"{name}attn.logit_scale", 3) for name in first] if version == 2 else []
    windows = tuple((table[1] + 1) // 2 for table in tables) or (DEFAULT_WINDOW[version],) * len(stages)
    stride = [pixels * 2 ** (len(stages) - 1) for pixels in patch]
    return side.InferredConfig(
        fields={
            "image_size": (windows[-1] * stride[0], windows[-1] * stride[1]),  # one window at the end
            "patch_size": tuple(patch),
            "channels": channels,
            "classes": side.count_classes(shapes, "head.weight"),
            "version": version,
            "stages": stages,
            "widths": tuple(side.get_shape(shapes, f"{name}attn.proj.weight", 2)[0] for name in first),
            "heads": tuple(shape[0] for shape in tables or scales),
            "windows": windows,
            "mlp_ratio": side.get_shape(shapes, f"{first[0]}mlp.fc1.weight", 2)[0] / width,
        },
        certain=frozenset({"version"}),
    )


def describe_sizes(config: side.ConfigFields, library: str) -> dict[str, Any]:
    """The arguments that timm and transformers share; both know one width, which doubles."""
    widths = config["widths"]
    if any(width != widths[0] * 2**stage for stage, width in enumerate(widths)):
        raise CheckpointError(f"widths is {widths}, which {library} cannot represent; expected each twice the last")
    patch = config["patch_size"]
    return {
        "patch_size": patch[0] if patch[0] == patch[1] else patch,
        "embed_dim": widths[0],
        "depths": config["stages"],
        "num_heads": config["heads"],
        "mlp_ratio": config["mlp_ratio"],
        **(
            {"pretrained_window_sizes": config["trained_windows"] or (0,) * len(widths)}
            if config["version"] == 2
            else {}
        ),
    }


def find_one_window(config: side.ConfigFields, library: str) -> int:
    """The window of all stages; an error if they differ, or if the last grid is smaller than a window."""
    windows, scale = set(config["windows"]), 2 ** (len(config["stages"]) - 1)
    smallest = min(
        -(-size // (patch * scale)) for size, patch in zip(config["image_size"], config["patch_size"], strict=True)
    )
    if len(windows) > 1 or min(windows) > smallest:
        raise CheckpointError(
            f"windows is {config['windows']} and the last grid has {smallest} rows or columns, which {library} cannot "
            "represent; expected one window, no larger than that"
        )
    return windows.pop()


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {"img_size": config["image_size"], "in_chans": config["channels"], "window_size": config["windows"]}
    arguments |= describe_sizes(config, "timm")
    name = "swin_tiny_patch4_window7_224" if config["version"] == 1 else "swinv2_tiny_window8_256"
    return {"architecture": name, "num_classes": config["classes"], "model_args": arguments}


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    name = "Swin" if config["version"] == 1 else "Swinv2"
    return make_hf_heading(config, name.lower(), name) | {
        "window_size": find_one_window(config, "transformers"),
        **describe_sizes(config, "transformers"),
        "qkv_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": config["dropout"],
        "attention_probs_dropout_prob": config["attention_dropout"],
        "drop_path_rate": config["stochastic_depth"],
        "dtype": "float32",
    }


def make_torchvision_buffers(config: side.ConfigFields) -> dict[str, Tensor]:
    """The index of each pair's offset, and of version 2 the offsets, which torchvision stores in every block."""
    window = find_one_window(config, "torchvision")
    place = (torch.arange(window)[:, None] * (2 * window - 1) + torch.arange(window)).flatten()
    index = (place[:, None] - place + (window - 1) * 2 * window).flatten()
    steps = torch.arange(1 - window, window).float() / max(window - 1, 1) * 8
    offsets = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1)[None]
    offsets = offsets.sign() * (offsets.abs() + 1).log2() / 3
    buffers = dict[str, Tensor]()
    for stage, depth in enumerate(config["stages"]):
        for block in range(depth):
            name = f"features.{2 * stage + 1}.{block}.attn."
            buffers[f"{name}relative_position_index"] = index
            if config["version"] == 2:
                buffers[f"{name}relative_coords_table"] = offsets
    return buffers


RESIZED = {  # the short side before the crop, by version, width and depth
    (1, 96, 6): 232,
    (1, 96, 18): 246,
    (1, 128, 18): 238,
    (2, 96, 6): 260,
    (2, 96, 18): 260,
    (2, 128, 18): 272,
}


def find_torchvision_crop(config: side.ConfigFields) -> float:
    size = config["image_size"][0]
    return size / RESIZED.get((config["version"], config["widths"][0], max(config["stages"])), size)


TRANSFORMS = {"by_query": OFFSETS_BY_QUERY, "without_keys": QV_IN_QKV}
BLOCK_TABLE = """
    {patch_embed.proj,norm}.*
    patch_embed.norm.* -> patch_norm.*
    layers.#.blocks.#.:
        {norm1,norm2,attn.proj,attn.qkv,mlp.fc#}.*
        attn.logit_scale
        attn.relative_position_bias_table -> attn.position_bias.table | by_query
        attn.[q_bias,v_bias] -> attn.qkv.qv_bias
        attn.cpb_mlp.#.* -> attn.position_bias.mlp.#.*
"""
TIMM_TABLE = """
    head.fc.* -> head.*
    layers.#.downsample.{norm.*,reduction.weight}
"""
AUTHORS_TABLE = """
    head.*
    layers.~.downsample.{norm.*,reduction.weight} -> layers.#.downsample.{norm.*,reduction.weight}
"""
# stages have odd numbers, what merges the tokens before them even ones
TORCHVISION_TABLE = """
    features.0.{0,2}.* -> {patch_embed.proj,patch_norm}.*
    features.{0,2,4,6}. -> layers.{0,1,2,3}.downsample.:
        {norm.*,reduction.weight}
    {norm,head}.*
    features.{1,3,5,7}.#. -> layers.{0,1,2,3}.blocks.#.:
        {norm1,norm2,attn.proj}.*
        mlp.{0,3}.* -> mlp.{fc1,fc2}.*
        attn.qkv.weight
"""
TORCHVISION_ATTENTION = {  # by version
    1: """
        attn.qkv.bias
        attn.relative_position_bias_table -> attn.position_bias.table | by_query
    """,
    2: """
        attn.qkv.bias -> attn.qkv.qv_bias | without_keys
        attn.logit_scale
        attn.cpb_mlp.#.* -> attn.position_bias.mlp.#.*
    """,
}
HF_TABLE = """
    embeddings.{patch_embeddings.projection,norm}.* -> {patch_embed.proj,patch_norm}.*
    {layernorm,classifier}.* -> {norm,head}.*
    encoder.layers.~.downsample.{norm.*,reduction.weight} -> layers.#.downsample.{norm.*,reduction.weight}
    encoder.layers.#.blocks.#. -> layers.#.blocks.#.:
        {layernorm_before,layernorm_after}.* -> {norm1,norm2}.*
        attention.output.dense.* -> attn.proj.*
        {intermediate,output}.dense.* -> mlp.{fc1,fc2}.*
"""
HF_ATTENTION = {  # by version; of 1 with the names on disk, then those in memory since v5
    1: """
        attention.self.[query,key,value].* -> attn.qkv.*
        attention.self.relative_position_bias_table -> attn.position_bias.table | by_query
        attention.{[q,k,v]_proj,o_proj}.* -> attn.{qkv,proj}.*
        attention.relative_position_bias.relative_position_bias_table -> attn.position_bias.table | by_query
        mlp.fc#.*
    """,
    2: """
        attention.self.[query,key,value].weight -> attn.qkv.weight
        attention.self.[query,value].bias -> attn.qkv.qv_bias
        attention.self.logit_scale -> attn.logit_scale
        attention.self.continuous_position_bias_mlp.#.* -> attn.position_bias.mlp.#.*
    """,
}
TIMM_ARGUMENTS = (
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depths", "num_heads", "window_size"),
    *("mlp_ratio", "pretrained_window_sizes", "drop_path_rate"),
)


HF_BLOCK = "encoder.layers.#.blocks.#."


def make_timm_source(table: str, *markers: str) -> side.SourceNames:
    return side.SourceNames(
        layout="timm",
        table=side.parse_table(BLOCK_TABLE + table, **TRANSFORMS),
        markers=("patch_embed.norm.weight", "layers.0.blocks.0.attn.proj.weight", *markers),
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "ignored": COMPUTED,
            "model_args": TIMM_ARGUMENTS,
            "argument_fields": {
                "window_size": "windows",
                "pretrained_window_sizes": "trained_windows",
                "img_size": "image_size",
            },
            "preset_fields": ("windows", "trained_windows"),
            "pretrained_cfg": {"crop_pct": 0.9},
        },
    )


def make_torchvision_source(version: int, marker: str) -> side.SourceNames:
    return side.SourceNames(
        layout="torchvision",
        table=side.parse_table(TORCHVISION_TABLE + TORCHVISION_ATTENTION[version], **TRANSFORMS),
        markers=("features.0.0.weight", marker),
        accepts=lambda config: config["version"] == version,
        supported={"channels": (3,), "trained_windows": (None,), "number of stages": tuple(range(1, MAX_STAGES + 1))},
        details={"ignored": COMPUTED, "buffers": make_torchvision_buffers, "crop": find_torchvision_crop},
    )


def make_hf_source(version: int, *markers: str) -> side.SourceNames:
    return side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE + HF_ATTENTION[version], **TRANSFORMS),
        markers=("embeddings.norm.weight", f"{HF_BLOCK}layernorm_before.weight", *markers),
        accepts=lambda config: config["version"] == version,
        card=make_hf_card,
        details={
            "model_type": "swin" if version == 1 else "swinv2",
            "norm_eps": 1e-5,
            "imagenet_mean": True,
            "preprocessing": {"interpolation": "bicubic"},
            "ignored": COMPUTED,
            "argument_fields": {
                "num_heads": "heads",
                "window_size": "windows",
                "pretrained_window_sizes": "trained_windows",
            },
        },
    )


SOURCES = (
    make_timm_source(TIMM_TABLE),
    make_timm_source(AUTHORS_TABLE, "layers.0.downsample.reduction.weight"),
    make_torchvision_source(1, "features.1.0.attn.relative_position_bias_table"),
    make_torchvision_source(2, "features.1.0.attn.cpb_mlp.0.weight"),
    make_hf_source(1),
    make_hf_source(2, f"{HF_BLOCK}attention.self.logit_scale"),
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config,
    sources=SOURCES,
    resampled={"position_bias.table": "map", "patch_embed.proj.weight": "kernel"},
)
FAMILY = Family("swin", SwinConfig, Swin, PRESETS, ALIASES, CHECKPOINT)
