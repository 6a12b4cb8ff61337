"""DeiT (Touvron 2020, arXiv 2012.12877): a ViT with a second token that learns from a teacher; also DeiT-III.

B batch, E prefix tokens (class, distillation), n = h·w patches, N = E + n tokens, D width.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_patch_config, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import Initialization, init_as_published, init_layers
from vitrail.models.names import encoder_names, hf_names
from vitrail.models.parts.encoder import (
    DropRates,
    PatchEncoder,
    make_encoder_blocks,
    make_head,
    prepend_tokens,
    zero_head,
)

FUSIONS = ("both", "softmax")  # answers that both heads contribute to


@dataclass(frozen=True, kw_only=True)
class DeiTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the features
    width: int = 768  # channels of a token
    depth: int = 12  # blocks
    heads: int = 12  # attention heads, each width / heads wide
    distilled: bool = False  # a distillation token next to the class token, with its own head
    answer: Literal["both", "softmax", "class", "distill"] = (
        "both"  # output of a distilled model: mean of both heads' logits or, as logits, of their softmaxes, or one head
    )
    layer_scale: float | None = None  # the factor that a block's branches start with; none: no factor
    prefix_positions: bool = True  # false in DeiT-III: its class token has no position
    initialization: Initialization = "vit"  # deit: of its authors, as in the presets; weights that are read replace it
    norm_eps: float = 1e-6
    dynamic: bool = False  # accept any multiple of the patch size at run time; the table is resampled

    def __post_init__(self) -> None:
        check_patch_config(self)
        if self.answer != "both" and not self.distilled:
            raise ConfigError(f"answer is {self.answer!r} for a DeiT with one head; expected 'both', or distilled=True")
        if self.answer == "softmax" and not self.classes:
            raise ConfigError("answer is 'softmax' for a DeiT without heads; expected 'both', or classes")


class DeiT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes); of a distilled model by default the mean of both heads, see `answer`.

    The paper's text adds the softmaxes of both heads; its code and all its successors take the mean of their logits.
    """

    config: DeiTConfig
    first_filters = "patch_embed.proj.weight"

    def __init__(self, config: DeiTConfig) -> None:
        super().__init__(config)
        width, patch = config.width, pair(config.patch_size)
        self.declare_level(patch)
        self.prefix_tokens = ("class", "distill") if config.distilled else ("class",)
        self.classifier_tokens = self.prefix_tokens if config.answer in FUSIONS else (config.answer,)
        classifiers = (("class", "head"), ("distill", "head_dist"))
        self.classifiers = classifiers[: self.prefix] if config.classes else ()
        positions = self.grid[0] * self.grid[1] + (self.prefix if config.prefix_positions else 0)

        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.dist_token = nn.Parameter(torch.empty(1, 1, width)) if config.distilled else None
        self.pos_embed = nn.Parameter(torch.empty(1, positions, width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_encoder_blocks(config, 4 * width, layer_scale=config.layer_scale)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.head = make_head(width, config.classes)
        self.head_dist = make_head(width, config.classes) if config.distilled else None
        self.init_weights()

    def draw_weights(self) -> None:
        """Every weight as in the ViT authors' code, with heads of zero, or as in DeiT's."""
        if self.config.initialization == "deit":
            tokens = [self.cls_token] if self.dist_token is None else [self.cls_token, self.dist_token]
            init_as_published(self, self.patch_embed.proj, *tokens, self.pos_embed)
            return
        init_layers(self)
        nn.init.zeros_(self.cls_token)
        nn.init.normal_(self.pos_embed, std=0.02)
        if self.dist_token is not None:
            nn.init.normal_(self.dist_token, std=0.02)  # not zero: it must differ from the class token
        zero_head(self.head, self.head_dist)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.encode(images, queries=self.prefix))

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        return self.pos_drop(prepend_tokens(patches, self.cls_token, self.dist_token) + self.tables(grid))

    def tables(self, grid: Grid) -> Tensor:
        table = resample(self.pos_embed, self.grid, grid)
        return F.pad(table, (0, 0, self.prefix + grid[0] * grid[1] - table.shape[1], 0))  # prefix tokens without rows

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the heads for `tokens`: (B, N, D) → (B, classes)."""
        answer = self.config.answer
        if self.head_dist is None or answer == "class":
            return self.head(tokens[:, 0])
        distilled = self.head_dist(tokens[:, 1])
        if answer == "distill":
            return distilled
        heads = torch.stack([self.head(tokens[:, 0]), distilled])
        if answer == "softmax":  # the logarithm of the mean probability, whose softmax it is
            return heads.log_softmax(-1).logsumexp(0) - math.log(len(heads))
        return heads.mean(0)

    def head_logits(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The logits of the class head and of the distillation head: (B, N, D) → (B, classes) each."""
        class_logits = self.head(tokens[:, 0])
        return (class_logits,) if self.head_dist is None else (class_logits, self.head_dist(tokens[:, 1]))


BASE = DeiTConfig(initialization="deit")
SIZES = {"tiny": replace(BASE, width=192, heads=3), "small": replace(BASE, width=384, heads=6), "base": BASE}
DEIT3 = replace(BASE, layer_scale=1e-4, prefix_positions=False)  # the authors'; timm starts with 1e-6
DEIT3_SIZES = {
    "small": replace(DEIT3, width=384, heads=6),
    "medium": replace(DEIT3, width=512, heads=8),
    "base": DEIT3,
    "large": replace(DEIT3, width=1024, depth=24, heads=16),
}
PRESETS = Presets(
    lambda: {
        **{f"deit_{s}_patch16_{px}": replace(SIZES[s], image_size=px) for s in SIZES for px in (224, 384)},
        **{
            f"deit_{s}_distilled_patch16_{px}": replace(SIZES[s], image_size=px, distilled=True)
            for s in SIZES
            for px in (224, 384)
        },
        **{f"deit3_{s}_patch16_{px}": replace(DEIT3_SIZES[s], image_size=px) for s in DEIT3_SIZES for px in (224, 384)},
        "deit3_huge_patch14_224": replace(DEIT3, width=1280, depth=32, heads=16, patch_size=14),
    }
)
ALIASES = {
    "DeiT-Ti": "deit_tiny_patch16_224",
    "DeiT-S": "deit_small_patch16_224",
    "DeiT-B": "deit_base_patch16_224",
    "DeiT-B@384": "deit_base_patch16_384",
    "DeiT-Ti-distilled": "deit_tiny_distilled_patch16_224",
    "DeiT-S-distilled": "deit_small_distilled_patch16_224",
    "DeiT-B-distilled": "deit_base_distilled_patch16_224",
    "DeiT-B-distilled@384": "deit_base_distilled_patch16_384",
    "DeiT-III-S": "deit3_small_patch16_224",
    "DeiT-III-M": "deit3_medium_patch16_224",
    "DeiT-III-B": "deit3_base_patch16_224",
    "DeiT-III-L": "deit3_large_patch16_224",
    "DeiT-III-H": "deit3_huge_patch14_224",
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    fields, distilled = encoder_names.infer_encoder_fields(shapes), "dist_token" in shapes
    return side.InferredConfig(
        fields={**fields, "distilled": distilled, "initialization": "deit"},
        stride=fields["patch_size"],
        prefix=1 + distilled,
    )


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    if config["distilled"] and not config["prefix_positions"]:
        raise CheckpointError("distilled models of timm have positions for both tokens; expected prefix_positions=True")
    arguments = encoder_names.make_timm_arguments(config) | {"no_embed_class": not config["prefix_positions"]}
    if config["distilled"]:
        return encoder_names.make_timm_card(config, "deit_tiny_distilled_patch16_224", arguments)
    arguments |= {"class_token": True, "reg_tokens": 0, "global_pool": "token", "fc_norm": False}
    return encoder_names.make_timm_card(config, "deit_tiny_patch16_224", arguments)


TIMM = replace(
    encoder_names.TIMM,
    markers=(encoder_names.PATCH_KERNEL, "dist_token"),
    card=make_timm_card,
    details={**encoder_names.TIMM_DETAILS, "imagenet_mean": True},
)
SOURCES = (
    TIMM,
    replace(TIMM, markers=(encoder_names.PATCH_KERNEL,), named="deit"),  # without distillation it has a ViT's tensors
    replace(encoder_names.FACEBOOK, markers=(encoder_names.PATCH_KERNEL,)),
    side.SourceNames(
        layout="hf",
        table=(
            *hf_names.HF_DISTILLED,
            *side.parse_table("embeddings.distillation_token -> dist_token"),
            *hf_names.HF_VIT_TABLE,
        ),
        markers=(hf_names.HF_KERNEL, "embeddings.distillation_token", "distillation_classifier.weight"),
        accepts=lambda config: config["distilled"] and not hf_names.is_dinov2(config),
        supported={"has a head": (True,)},
        card=lambda config: hf_names.make_hf_vit_card(config, "deit", "DeiT"),
        details=hf_names.HF_DEIT_DETAILS,
    ),
    *(replace(each, markers=()) for each in (*encoder_names.WRITTEN_AS_VIT, hf_names.HF_VIT, *hf_names.HF_DINO)),
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config,
    sources=SOURCES,
    heads_by_width=True,
    implied={"activation": "gelu"},
    general_family="vit",
)
FAMILY = Family("deit", DeiTConfig, DeiT, PRESETS, ALIASES, CHECKPOINT)
