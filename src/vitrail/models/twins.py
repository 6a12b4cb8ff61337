"""Twins-SVT (Chu 2021, arXiv 2104.13840): attention within windows, then of all tokens to a few keys, in turn.

B batch, n = h·w tokens, W windows of m tokens, D width, H heads; h, w and D change by stage. There is no table of
positions, so images may have any multiple of the last stride. Grids without whole windows are padded, and the padding
is masked, as in the authors' code for dense prediction; timm lets tokens attend to it.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_as_pvt
from vitrail.models.parts.attention import ReducedAttention
from vitrail.models.parts.convolutions import ConvEmbed, Peg
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import PegModel, check_reductions, check_stages, make_stage_blocks, make_stage_levels
from vitrail.models.parts.windows import MaskedWindowAttention, check_windows

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class TwinsConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, others work too
    patch_size: int = 4  # pixels of a token in the first stage; each next stage joins 2×2 tokens
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    stages: tuple[int, ...] = (2, 2, 10, 4)  # blocks per stage; even ones attend within windows
    widths: tuple[int, ...] = (64, 128, 256, 512)  # channels of a token, per stage
    heads: tuple[int, ...] = (2, 4, 8, 16)  # attention heads per stage, each width / heads wide
    windows: tuple[int, ...] = (7, 7, 7, 7)  # rows and columns of a window, per stage
    reductions: tuple[int, ...] = (
        8,
        4,
        2,
        1,
    )  # rows and columns of tokens that become one key of odd blocks, per stage
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    dynamic: ClassVar[bool] = True  # takes other sizes at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "windows", "reductions")
        last = pair(self.patch_size * 2 ** (len(self.stages) - 1))
        check_windows(self.windows, pair(self.image_size), pair(self.patch_size), last)
        check_reductions(self.reductions, make_levels(self))


class Twins(PegModel):
    """Attention within windows and of all tokens to a few keys, in turn."""

    config: TwinsConfig
    first_filters = "patch_embeds.0.proj.weight"

    def __init__(self, config: TwinsConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        last = self.levels[-1].stride
        least = max(ratio * level.stride[0] for ratio, level in zip(config.reductions, self.levels, strict=True))
        self.sizes = ImageSizes(multiple=last, minimum=(max(least, last[0]), max(least, last[1])))
        self.classifiers = (("mean", "head"),) if config.classes else ()
        before = (config.channels, *config.widths)
        sides = (config.patch_size, *(2 for _ in config.widths[1:]))
        self.patch_embeds = nn.ModuleList(
            ConvEmbed(channels, width, each, each)
            for channels, width, each in zip(before, config.widths, sides, strict=False)
        )
        self.pos_block = nn.ModuleList(Peg(width) for width in config.widths)  # after the first block of a stage
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            make_stage_blocks(config, stage, hidden, partial(make_attention, config, stage), norm_eps=NORM_EPS)
            for stage, hidden in enumerate(round(config.mlp_ratio * width) for width in config.widths)
        )
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in PVT's code, which the authors' is based on; the head is zero."""
        init_as_pvt(self)
        zero_head(self.head)


def make_attention(config: TwinsConfig, stage: int, number: int) -> nn.Module:
    """Of all tokens to a few keys in odd blocks, within windows in even ones."""
    width, heads, dropout = config.widths[stage], config.heads[stage], config.attention_dropout
    if number % 2:
        return ReducedAttention(width, heads, config.reductions[stage], dropout=dropout)
    return MaskedWindowAttention(width, heads, pair(config.windows[stage]), dropout=dropout)


def make_levels(config: TwinsConfig) -> tuple[Level, ...]:
    return make_stage_levels(config.image_size, config.patch_size, config.widths, config.stages, "blocks.{}.{}")


PRESETS = Presets(
    lambda: {
        "twins_svt_small": TwinsConfig(),
        "twins_svt_base": TwinsConfig(stages=(2, 2, 18, 2), widths=(96, 192, 384, 768), heads=(3, 6, 12, 24)),
        "twins_svt_large": TwinsConfig(stages=(2, 2, 18, 2), widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32)),
    }
)
ALIASES = {"Twins-SVT-S": "twins_svt_small", "Twins-SVT-B": "twins_svt_base", "Twins-SVT-L": "twins_svt_large"}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Windows are not in the weights; heads are those of the published model of these widths."""
    _, channels, patch, _ = side.get_shape(shapes, "patch_embeds.0.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"blocks\.(\d+)\.", r"blocks\.{}\.(\d+)\.", first=0)
    numbers = range(len(stages))
    widths = tuple(side.get_shape(shapes, f"patch_embeds.{stage}.proj.weight", 4)[0] for stage in numbers)
    fields = side.describe_stages(shapes, channels, stages, widths) | {
        "patch_size": patch,
        "windows": (7,) * len(stages),
        "reductions": tuple(shapes.get(f"blocks.{stage}.1.attn.sr.weight", (1,))[-1] for stage in numbers),
        "mlp_ratio": side.get_shape(shapes, "blocks.0.0.mlp.fc1.weight", 2)[0] / widths[0],
    }
    return side.InferredConfig(fields=fields | side.find_published_heads(PRESETS, widths))


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "in_chans": config["channels"],
        "embed_dims": config["widths"],
        "num_heads": config["heads"],
        "mlp_ratios": [config["mlp_ratio"]] * len(config["stages"]),
        "depths": config["stages"],
        "sr_ratios": config["reductions"],
        "wss": config["windows"],
    }
    return {"architecture": "twins_svt_small", "num_classes": config["classes"], "model_args": arguments}


SOURCES = (
    side.SourceNames(  # also of the authors
        layout="timm",
        table=side.parse_table(
            """
            {patch_embeds.#.proj,patch_embeds.#.norm,pos_block.#.proj.#,norm,head}.*
            blocks.#.#.{norm1,norm2,mlp.fc#,attn.qkv,attn.q,attn.kv,attn.proj,attn.sr,attn.norm}.*
            """
        ),
        markers=("patch_embeds.0.proj.weight", "blocks.0.0.attn.qkv.weight"),
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "model_args": (
                *("img_size", "patch_size", "in_chans", "num_classes", "embed_dims", "num_heads", "mlp_ratios"),
                *("depths", "sr_ratios", "wss"),
            ),
            "argument_fields": {"num_heads": "heads", "wss": "windows", "img_size": "image_size"},
            "preset_fields": ("windows",),
            "pretrained_cfg": {"crop_pct": 0.9},
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={})
FAMILY = Family("twins", TwinsConfig, Twins, PRESETS, ALIASES, CHECKPOINT)
