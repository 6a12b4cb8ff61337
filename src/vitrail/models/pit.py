"""PiT (Heo 2021, arXiv 2103.16302): a ViT that pools its tokens twice, so that width grows as the grid shrinks.

B batch, E prefix tokens (class, distillation), n = h·w patches, N = E + n tokens, D width; h, w and D change by stage.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.names import encoder_names
from vitrail.models.parts.encoder import DropRates, make_head, prepend_tokens, zero_head
from vitrail.models.parts.stages import check_stages, flatten_map, make_halved_levels, name_blocks, unflatten_map

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class PiTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: int = 16
    stride: int = 8  # pixels between patches; less than patch_size: they overlap
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the features
    stages: tuple[int, ...] = (2, 6, 4)  # blocks per stage; each stage but the first halves the grid
    widths: tuple[int, ...] = (144, 288, 576)  # channels of a token, per stage
    heads: tuple[int, ...] = (3, 6, 12)  # attention heads per stage, each width / heads wide
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    distilled: bool = False  # a distillation token next to the class token, with its own head
    answer: Literal["both", "class", "distill"] = "both"  # of a distilled model: the mean of both heads, or one of them
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # block i of n has the rate · i/n
    dynamic: bool = False  # accept any multiple of the stride at run time; the table is resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        for before, width in pairwise(self.widths):
            if width % before:
                raise ConfigError(f"a stage of width {width} after one of {before}; expected a multiple of {before}")
        if self.stride > self.patch_size:
            raise ConfigError(
                f"stride {self.stride} of patches of {self.patch_size} pixels; expected no gaps between them"
            )
        if self.answer != "both" and not self.distilled:
            raise ConfigError(f"answer is {self.answer!r} for a PiT with one head; expected 'both', or distilled=True")
        find_overlapping_grid(pair(self.image_size), self.patch_size, self.stride)


def find_overlapping_grid(image: Grid, patch: int, stride: int) -> Grid:
    """Rows and columns of overlapping patches in an image."""
    if min(image) < patch or image[0] % stride or image[1] % stride:
        near = [max(round(side / stride), -(-patch // stride)) * stride for side in image]
        raise ConfigError(
            f"image of {image[0]}×{image[1]} pixels; expected a multiple of {stride} of at least {patch}: "
            f"resize or crop it, for example to {near[0]}×{near[1]}"
        )
    return (image[0] - patch) // stride + 1, (image[1] - patch) // stride + 1


class PiT(ImageModel):
    """(B, C, H, W) → logits (B, classes); of a distilled model by default the mean of both heads, see `answer`."""

    config: PiTConfig
    first_filters = "patch_embed.conv.weight"
    no_masking_reason = "they overlap"
    no_dropping_reason = "the convolutions between its stages need a complete grid"

    def __init__(self, config: PiTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        any_size = ImageSizes(multiple=pair(config.stride), minimum=pair(config.patch_size))
        self.sizes = any_size if config.dynamic else ImageSizes()
        self.prefix_tokens = ("class", "distill") if config.distilled else ("class",)
        self.classifier_tokens = self.prefix_tokens if config.answer == "both" else (config.answer,)
        self.classifiers = (("class", "head"), ("distill", "head_dist"))[: self.prefix] if config.classes else ()

        width, last = config.widths[0], config.widths[-1]
        convolution = nn.Conv2d(config.channels, width, config.patch_size, config.stride)
        self.patch_embed = nn.ModuleDict({"conv": convolution})
        self.pos_embed = nn.Parameter(torch.empty(1, width, *self.levels[0].grid))  # of the patches only
        self.cls_token = nn.Parameter(torch.empty(1, self.prefix, width))
        self.pos_drop = nn.Dropout(config.dropout)
        rates = [config.stochastic_depth * n / sum(config.stages) for n in range(sum(config.stages))]
        self.transformers = nn.ModuleList()
        for stage, depth in enumerate(config.stages):
            before, width = config.widths[max(stage - 1, 0)], config.widths[stage]
            blocks = nn.ModuleList(
                Block(
                    width,
                    config.heads[stage],
                    round(config.mlp_ratio * width),
                    norm_eps=NORM_EPS,
                    dropout=config.dropout,
                    attention_dropout=config.attention_dropout,
                    stochastic_depth=rate,
                )
                for rate in rates[:depth]
            )
            self.transformers.append(PiTStage(TokenPool(before, width) if stage else None, blocks))
            rates = rates[depth:]
        self.norm = nn.LayerNorm(last, NORM_EPS)
        self.head = make_head(last, config.classes)
        self.head_dist = make_head(last, config.classes) if config.distilled else None
        self.init_weights()

    def draw_weights(self) -> None:
        """torch's own, as in the authors' code, tokens and positions small; the heads are zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
                module.reset_parameters()
        for table in (self.pos_embed, self.cls_token):
            nn.init.trunc_normal_(table, std=0.02)
        zero_head(self.head, self.head_dist)
        for _, head in self.classifiers:
            nn.init.zeros_(self.get_submodule(head).get_parameter("bias"))

    def check_images(self, images: Tensor) -> Grid:
        super().check_images(images)
        return find_overlapping_grid((images.shape[2], images.shape[3]), self.config.patch_size, self.config.stride)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return flatten_map(self.patch_embed["conv"](images)), grid

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        return prepend_tokens(self.pos_drop(patches + self.tables(grid)), self.cls_token)

    def tables(self, grid: Grid) -> Tensor:
        return resample(flatten_map(self.pos_embed), self.levels[0].grid, grid)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        *body, last = self.transformers
        for stage in body:
            x, grid = stage(x, grid)
        return last(x, grid, queries)[0]

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        (x, grid), maps = self.embed(images), list[Tensor]()
        for stage in self.transformers:
            x, grid = stage(x, grid)
            maps.append(unflatten_map(x[:, self.prefix :], grid))
        return maps

    def logits(self, tokens: Tensor) -> Tensor:
        """The mean of the heads that answer: (B, N, D) → (B, classes)."""
        heads = [*filter(None, (self.head, self.head_dist))]
        read = [self.prefix_tokens.index(name) for name in self.classifier_tokens]
        return torch.stack([heads[n](tokens[:, n]) for n in read]).mean(0)

    def head_logits(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The logits of the class head and of the distillation head: (B, N, D) → (B, classes) each."""
        return tuple(head(tokens[:, n]) for n, head in enumerate(filter(None, (self.head, self.head_dist))))


def make_levels(config: PiTConfig) -> tuple[Level, ...]:
    grid = find_overlapping_grid(pair(config.image_size), config.patch_size, config.stride)
    blocks = name_blocks(config.stages, "transformers.{}.blocks.{}")
    return make_halved_levels(grid, pair(config.stride), config.widths, blocks)


class PiTStage(nn.Module):
    """Pools the tokens, then blocks of a ViT: (B, N, D) and the grid of its patches → the same at half the size."""

    def __init__(self, pool: "TokenPool | None", blocks: nn.ModuleList) -> None:
        super().__init__()
        self.pool, self.blocks = pool, blocks

    def forward(self, x: Tensor, grid: Grid, queries: int | None = None) -> tuple[Tensor, Grid]:
        if self.pool is not None:
            x, grid = self.pool(x, grid)
        *body, last = self.blocks
        for block in body:
            x = block(x, grid)
        return last(x, grid, queries), grid


class TokenPool(nn.Module):
    """A convolution of stride 2 within each channel of the patches, a linear map of the prefix tokens."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out_width, 3, stride=2, padding=1, groups=width)
        self.fc = nn.Linear(width, out_width)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        prefix = x.shape[1] - grid[0] * grid[1]
        pooled = self.conv(unflatten_map(x[:, prefix:], grid))  # (B, D, h/2, w/2)
        return torch.cat([self.fc(x[:, :prefix]), flatten_map(pooled)], dim=1), (pooled.shape[2], pooled.shape[3])


SIZES = {
    "ti": PiTConfig(widths=(64, 128, 256), heads=(2, 4, 8)),
    "xs": PiTConfig(widths=(96, 192, 384), heads=(2, 4, 8)),
    "s": PiTConfig(),
    "b": PiTConfig(patch_size=14, stride=7, stages=(3, 6, 4), widths=(256, 512, 1024), heads=(4, 8, 16)),
}
PRESETS = Presets(
    lambda: {
        **{f"pit_{size}_224": config for size, config in SIZES.items()},
        **{f"pit_{size}_distilled_224": replace(config, distilled=True) for size, config in SIZES.items()},
    }
)
LETTERS = {"ti": "Ti", "xs": "XS", "s": "S", "b": "B"}
ALIASES = {
    **{f"PiT-{LETTERS[size]}": f"pit_{size}_224" for size in SIZES},
    **{f"PiT-{LETTERS[size]}-distilled": f"pit_{size}_distilled_224" for size in SIZES},
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Patches overlap by half, as in all published models; heads are those of the published model of these widths."""
    width, channels, patch, _ = side.get_shape(shapes, "patch_embed.conv.weight", 4)
    stages = side.count_stage_blocks(shapes, r"transformers\.(\d+)\.", r"transformers\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"transformers.{stage}.blocks.0.mlp.fc1.weight" for stage in range(len(stages))]
    widths = tuple(side.get_shape(shapes, name, 2)[1] for name in first)
    rows, columns = side.get_shape(shapes, "pos_embed", 4)[2:]
    stride = -(-patch // 2)
    fields = side.describe_stages(shapes, channels, stages, widths) | {
        "image_size": ((rows - 1) * stride + patch, (columns - 1) * stride + patch),
        "patch_size": patch,
        "stride": stride,
        "mlp_ratio": shapes[first[0]][0] / width,
        "distilled": side.get_shape(shapes, "cls_token", 3)[1] == 2,
    }
    return side.InferredConfig(fields=fields | side.find_published_heads(SIZES, widths))


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "stride": config["stride"],
        "in_chans": config["channels"],
        "base_dims": [width // heads for width, heads in zip(config["widths"], config["heads"], strict=True)],
        "depth": config["stages"],
        "heads": config["heads"],
        "mlp_ratio": config["mlp_ratio"],
        "distilled": config["distilled"],
    }
    return encoder_names.make_timm_card({**config, "width": config["widths"][-1]}, "pit_s_224", arguments)


# timm's, then what the authors' files name differently
NAME_TABLE = """
    {cls_token,pos_embed}
    {patch_embed.conv,norm,head,head_dist}.*
    transformers.#.blocks.#.{norm1,attn.qkv,attn.proj,norm2,mlp.fc#}.*
    transformers.#.pool.{conv,fc}.*
    pools.~.{conv,fc}.* -> transformers.#.pool.{conv,fc}.*
"""
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(NAME_TABLE),
        markers=("patch_embed.conv.weight", "transformers.0.blocks.0.norm1.weight"),
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "argument_fields": {"heads": "heads", "stride": "stride", "img_size": "image_size"},
            "pretrained_cfg": {"crop_pct": 0.9},
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={"pos_embed": "map"})
FAMILY = Family("pit", PiTConfig, PiT, PRESETS, ALIASES, CHECKPOINT)
