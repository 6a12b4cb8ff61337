"""CrossViT (Chen 2021, arXiv 2103.14899): two ViTs read small and large patches, and exchange their class tokens.

In each of K multi-scale blocks, every branch runs its own blocks; then each class token attends to the patches of the
other branch. B batch, n = h·w patches of a branch, N = 1 + n tokens, D width of a branch, H heads, K width of a head.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.attention import AttentionLayer, Mask, Projected, split_heads
from vitrail.layers.block import StochasticDepth
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_heads, check_images, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import DropRates, make_blocks, prepend_tokens, scale_rate, zero_head

STEM_STRIDES = {12: (4, 3, 1), 16: (4, 2, 2)}  # of three convolutions, by patch size
TURNS = ((0, 1), (1, 0))  # the branch whose class token changes, and the one that it attends to


@dataclass(frozen=True, kw_only=True)
class CrossViTConfig(DropRates):
    image_size: Size = 240  # rows, columns; one number for a square
    patch_sizes: tuple[int, ...] = (12, 16)  # this and the next three: of the first branch, and of the second
    scales: tuple[float, ...] = (1.0, 224 / 240)  # of the image that a branch reads, rounded to whole patches
    widths: tuple[int, ...] = (192, 384)  # channels of a token
    heads: tuple[int, ...] = (6, 6)  # attention heads, each width / heads wide
    branch_depths: tuple[int, ...] = (1, 4)  # blocks of a branch in each multi-scale block
    depth: int = 3  # multi-scale blocks
    mlp_ratio: int = 4  # width of an MLP per channel
    convolutions: bool = False  # three convolutions make the patches: the models with a dagger (†)
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns both class tokens, concatenated
    norm_eps: float = 1e-6
    dynamic: bool = False  # accept any size at run time; the tables are resampled

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("patch_sizes", "scales", "widths", "heads", "branch_depths"):
            if len(given := vars(self)[name]) != 2:
                raise ConfigError(f"{name} is {given}; expected two numbers, one per branch")
        for width, heads in zip(self.widths, self.heads, strict=True):
            check_heads(width, heads)
        if self.convolutions and not set(self.patch_sizes) <= set(STEM_STRIDES):
            raise ConfigError(f"patch_sizes {self.patch_sizes} of convolutions; expected 12 and 16")


class CrossViT(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the class tokens of both branches (B, D1 + D2)."""

    config: CrossViTConfig
    prefix_tokens = classifier_tokens = ("class",)  # of each branch
    final_norm = ""  # one per branch
    no_tokens_reason = "its two branches have tokens of two widths and grids"
    no_masking_reason = "its two branches cut the image into different patches"

    def __init__(self, config: CrossViTConfig) -> None:
        super().__init__(config)
        image, eps = pair(config.image_size), config.norm_eps
        grids = [find_scaled_grid(image, *branch) for branch in zip(config.patch_sizes, config.scales, strict=True)]
        self.levels = tuple(
            Level(
                grid=grid,
                stride=(round(image[0] / grid[0]), round(image[1] / grid[1])),
                width=config.widths[branch],
                blocks=list_branch_blocks(branch, config.depth, config.branch_depths[branch]),
            )
            for branch, grid in enumerate(grids)
        )
        self.sizes = ImageSizes(multiple=(1, 1) if config.dynamic else None)
        self.classifiers = (("class", "head"),) if config.classes else ()
        self.first_filters = f"patch_embed.0.proj{'.0' if config.convolutions else ''}.weight"
        self.patch_embed = nn.ModuleList(
            BranchEmbed(*kind, config.channels, convolutions=config.convolutions)
            for kind in zip(config.widths, config.patch_sizes, strict=True)
        )
        for number, (width, grid) in enumerate(zip(config.widths, grids, strict=True)):
            self.register_parameter(f"cls_token_{number}", nn.Parameter(torch.empty(1, 1, width)))
            self.register_parameter(f"pos_embed_{number}", nn.Parameter(torch.empty(1, 1 + math.prod(grid), width)))
        self.pos_drop = nn.Dropout(config.dropout)
        deepest, rates = max(config.branch_depths), (config.dropout, config.attention_dropout)
        total = config.depth * deepest
        drop_paths = [scale_rate(config.stochastic_depth, number, total) for number in range(total)]
        kind = (config.widths, config.heads, config.branch_depths, config.mlp_ratio, eps, rates)
        self.blocks = nn.ModuleList(
            MultiScaleBlock(*kind, drop_paths[layer * deepest : (layer + 1) * deepest]) for layer in range(config.depth)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width, eps) for width in config.widths)
        self.head = BranchHeads(config.widths, config.classes) if config.classes else nn.Identity()
        self.init_weights()

    @property
    def sequence(self) -> tuple[str, ...]:
        return tuple(f"blocks.{layer}" for layer in range(self.config.depth))

    @property
    def feature_width(self) -> int:
        return sum(self.config.widths)

    def draw_weights(self) -> None:
        """Linear maps, class tokens and positions as in the authors' code, the rest as in a ViT; the heads are zero."""
        init_layers(self)
        for layer in [module for module in self.modules() if isinstance(module, nn.Linear)]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        for table in self.parameters(recurse=False):
            nn.init.trunc_normal_(table, std=0.02)
        zero_head(*self.head.children())

    def forward(self, images: Tensor) -> Tensor:
        tokens, _ = self.run_branches(images)
        read = [norm(x[:, 0]) for norm, x in zip(self.norm, tokens, strict=True)]
        return self.logits(torch.cat(read, dim=1))

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the heads for both class tokens, concatenated: (B, D1 + D2) → (B, classes)."""
        return self.head(tokens)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        branches = zip(*self.run_branches(images), strict=True)
        return [x[:, 1:].transpose(1, 2).unflatten(2, grid) for x, grid in branches]

    def run_branches(self, images: Tensor) -> tuple[list[Tensor], list[Grid]]:
        """The tokens of each branch before its final norm, (B, N, D), and its grid."""
        config, tokens, grids = self.config, list[Tensor](), list[Grid]()
        self.check_images(images)
        for number, embed in enumerate(self.patch_embed):
            patch = config.patch_sizes[number]
            grid = find_scaled_grid((images.shape[2], images.shape[3]), patch, config.scales[number])
            patches = embed(resize(images, (patch * grid[0], patch * grid[1])))
            table = resample(self.get_parameter(f"pos_embed_{number}"), self.levels[number].grid, grid)
            token = self.get_parameter(f"cls_token_{number}")
            tokens.append(self.pos_drop(prepend_tokens(patches, token) + table))
            grids.append(grid)
        for block in self.blocks:
            tokens = block(tokens, grids)
        return tokens, grids

    def check_images(self, images: Tensor) -> Grid:
        size, dynamic = pair(self.config.image_size), self.sizes.dynamic
        return check_images(images, self.config.channels, size, (1, 1), dynamic=dynamic)


def list_branch_blocks(branch: int, depth: int, branch_depth: int) -> tuple[str, ...]:
    """The blocks of a branch, and those in which the other branch's token attends to its patches, in order."""
    own = (f"blocks.{{}}.blocks.{branch}.{number}" for number in range(branch_depth))
    names = (*own, f"blocks.{{}}.fusion.{1 - branch}")
    return tuple(name.format(layer) for layer in range(depth) for name in names)


def find_scaled_grid(image: tuple[int, int], patch: int, scale: float) -> Grid:
    """Rows and columns of patches in the scaled image, rounded to whole patches."""
    return (max(round(image[0] * scale / patch), 1), max(round(image[1] * scale / patch), 1))


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic, without antialiasing, as the authors do: (B, C, H, W)."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size=size, mode="bicubic", align_corners=False)


class BranchEmbed(nn.Module):
    """Patches of one branch, by one convolution or three: (B, C, H, W) → (B, n, D)."""

    def __init__(self, width: int, patch: int, channels: int, *, convolutions: bool) -> None:
        super().__init__()
        if convolutions:
            first, second, third = STEM_STRIDES[patch]
            self.proj = nn.Sequential(
                nn.Conv2d(channels, width // 4, 7, first, 3),
                nn.ReLU(),
                nn.Conv2d(width // 4, width // 2, 3, second, 0 if second == 3 else 1),
                nn.ReLU(),
                nn.Conv2d(width // 2, width, 3, third, 1),
            )
        else:
            self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class MultiScaleBlock(nn.Module):
    """The blocks of both branches, then their exchange: the tokens of both, each (B, N, D)."""

    def __init__(
        self,
        widths: tuple[int, ...],
        heads: tuple[int, ...],
        depths: tuple[int, ...],
        mlp_ratio: int,
        norm_eps: float,
        rates: tuple[float, float],
        drop_paths: list[float],
    ) -> None:
        super().__init__()
        dropout, attention_dropout = rates
        self.blocks = nn.ModuleList()
        for width, count, depth in zip(widths, heads, depths, strict=True):
            branch = make_blocks(
                depth, width, count, mlp_ratio * width, norm_eps=norm_eps, rates=(dropout, attention_dropout, 0.0)
            )
            for block, rate in zip(branch, drop_paths, strict=False):
                block.drop_path = StochasticDepth(rate)
            self.blocks.append(branch)
        self.projs = nn.ModuleList(make_projection(widths[a], widths[b], norm_eps) for a, b in TURNS)
        self.fusion = nn.ModuleList(
            FusionBlock(widths[b], heads[b], norm_eps, (*rates, drop_paths[-1])) for _, b in TURNS
        )
        self.revert_projs = nn.ModuleList(make_projection(widths[b], widths[a], norm_eps) for a, b in TURNS)

    def forward(self, tokens: list[Tensor], grids: list[Grid]) -> list[Tensor]:
        tokens = list(tokens)
        for branch, blocks in enumerate(self.blocks):
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                tokens[branch] = block(tokens[branch], grids[branch])
        exchanged = list[Tensor]()
        for own, other in TURNS:
            token = self.projs[own](tokens[own][:, :1])
            token = self.fusion[own](torch.cat([token, tokens[other][:, 1:]], dim=1), grids[other])
            exchanged.append(torch.cat([self.revert_projs[own](token), tokens[own][:, 1:]], dim=1))
        return exchanged


def make_projection(width: int, out_width: int, norm_eps: float) -> nn.Sequential:
    """Norm, GELU and a linear map to another width."""
    return nn.Sequential(nn.LayerNorm(width, norm_eps), nn.GELU(), nn.Linear(width, out_width))


class FusionBlock(nn.Module):
    """The first token attends to all, without an MLP: (B, N, D) → (B, 1, D)."""

    def __init__(self, width: int, heads: int, norm_eps: float, rates: tuple[float, float, float]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, norm_eps)
        self.attn = FirstTokenAttention(width, heads, dropout=rates[1])
        self.drop = nn.Dropout(rates[0])
        self.drop_path = StochasticDepth(rates[2])

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x[:, :1] + self.drop_path(self.drop(self.attn(self.norm1(x), grid)))


class FirstTokenAttention(AttentionLayer):
    """Attention whose only query is the first token: (B, N, D) → (B, 1, D)."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.wq, self.wk, self.wv = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        del grid, queries  # there is one query, and no positions
        q, k, v = self.wq(x[:, :1]), self.wk(x), self.wv(x)
        return split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads), mask


class BranchHeads(nn.Module):
    """The mean of the branches' heads, for their class tokens concatenated: (B, D1 + D2) → (B, classes)."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.widths = widths
        for number, width in enumerate(widths):
            self.add_module(str(number), nn.Linear(width, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        parts = zip(self.children(), tokens.split(self.widths, dim=-1), strict=True)
        return torch.stack([head(part) for head, part in parts]).mean(0)


def make_size(width: int, heads: int, mlp_ratio: int = 4, depth: int = 4) -> CrossViTConfig:
    """The second branch is twice as wide as the first."""
    return CrossViTConfig(
        widths=(width, 2 * width), heads=(heads, heads), mlp_ratio=mlp_ratio, branch_depths=(1, depth)
    )


SIZES = {
    "tiny": make_size(96, 3),
    "small": make_size(192, 6),
    "base": make_size(384, 12),
    "9": make_size(128, 4, mlp_ratio=3, depth=3),
    "15": make_size(192, 6, mlp_ratio=3, depth=5),
    "18": make_size(224, 7, mlp_ratio=3, depth=6),
}
DAGGER = {name: replace(SIZES[name], convolutions=True) for name in ("9", "15", "18")}
PRESETS = Presets(
    lambda: {
        **{f"crossvit_{name}_240": config for name, config in SIZES.items()},
        **{f"crossvit_{name}_dagger_240": config for name, config in DAGGER.items()},
        **{
            f"crossvit_{n}_dagger_408": replace(DAGGER[n], image_size=408, scales=(1.0, 384 / 408))
            for n in ("15", "18")
        },
    }
)
LETTERS = {"tiny": "Ti", "small": "S", "base": "B"}
ALIASES = {
    **{f"CrossViT-{LETTERS.get(name, name)}": f"crossvit_{name}_240" for name in SIZES},
    **{f"CrossViT-{name}†": f"crossvit_{name}_dagger_240" for name in DAGGER},
    **{f"CrossViT-{name}†@408": f"crossvit_{name}_dagger_408" for name in ("15", "18")},
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Images are square; convolutions make patches of 12 and 16 pixels, as in all published models."""
    convolutions = "patch_embed.0.proj.0.weight" in shapes
    kernels = [f"patch_embed.{n}.proj{'.0' if convolutions else ''}.weight" for n in (0, 1)]
    patches = tuple(12 + 4 * n if convolutions else side.get_shape(shapes, kernels[n], 4)[2] for n in (0, 1))
    tables = [side.get_shape(shapes, f"pos_embed_{n}", 3) for n in (0, 1)]
    grids = [math.isqrt(rows - 1) for _, rows, _ in tables]
    if 0 in grids or any(grid**2 + 1 != rows for grid, (_, rows, _) in zip(grids, tables, strict=True)):
        raise CheckpointError(f"positions of {tables[0][1]} and {tables[1][1]} tokens; expected two squares and 1 more")
    widths, sides = (tables[0][2], tables[1][2]), [grids[n] * patches[n] for n in (0, 1)]
    depths = [side.count_numbers(shapes, rf"blocks\.0\.blocks\.{n}\.(\d+)\.") for n in (0, 1)]
    fields = {
        "image_size": (sides[0], sides[0]),
        "patch_sizes": patches,
        "scales": (1.0, sides[1] / sides[0]),
        "widths": widths,
        "branch_depths": tuple(depths),
        "depth": side.count_numbers(shapes, r"blocks\.(\d+)\."),
        "mlp_ratio": side.get_shape(shapes, "blocks.0.blocks.0.0.mlp.fc1.weight", 2)[0] // widths[0],
        "convolutions": convolutions,
        "channels": side.get_shape(shapes, kernels[0], 4)[1],
        "classes": side.count_classes(shapes, "head.0.weight"),
    }
    return side.InferredConfig(fields=fields | side.find_published_heads(SIZES, widths))


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "img_size": config["image_size"],
        "img_scale": config["scales"],
        "patch_size": config["patch_sizes"],
        "in_chans": config["channels"],
        "embed_dim": config["widths"],
        "depth": [[*config["branch_depths"], 0]] * config["depth"],
        "num_heads": config["heads"],
        "mlp_ratio": [config["mlp_ratio"], config["mlp_ratio"], 1],
        "multi_conv": config["convolutions"],
    }
    return {"architecture": "crossvit_tiny_240", "num_classes": config["classes"], "model_args": arguments}


TABLE = """
    {patch_embed.#.proj,patch_embed.#.proj.#,norm.#,head.#}.*
    blocks.#.blocks.#.#.{norm1,attn.qkv,attn.proj,norm2,mlp.fc#}.*
    blocks.#.fusion.#.{norm1,attn.wq,attn.wk,attn.wv,attn.proj}.*
    blocks.#.{projs,revert_projs}.#.#.*
"""
TIMM = side.SourceNames(
    layout="timm",
    table=side.parse_table(TABLE + "{cls_token,pos_embed}_#"),
    markers=("pos_embed_0", "blocks.0.fusion.0.norm1.weight"),
    assumed={"norm_eps": 1e-6},
    card=make_timm_card,
    details={
        "only_in_timm": True,
        "imagenet_mean": True,
        "model_args": tuple(make_timm_card({**vars(CrossViTConfig())})["model_args"]),
        "argument_fields": {"num_heads": "heads"},
        "pretrained_cfg": {"crop_pct": 0.875},
    },
)
AUTHORS = side.SourceNames(
    layout="authors",
    table=side.parse_table(TABLE + "{cls_token,pos_embed}.# -> {cls_token,pos_embed}_#"),
    markers=("pos_embed.0", "blocks.0.fusion.0.norm1.weight"),
    assumed={"norm_eps": 1e-6},
    details={"wrapper": "model"},
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config, sources=(TIMM, AUTHORS), resampled={"pos_embed_0": "first_grid", "pos_embed_1": "grid"}
)
FAMILY = Family("crossvit", CrossViTConfig, CrossViT, PRESETS, ALIASES, CHECKPOINT)
