"""Models of several stages: checks of their configs, their levels, tokens as maps, and what such models share.

B batch, n = h·w tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.block import Activation, Block
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import Size, check_grid, check_heads, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.parts.encoder import scale_rate


def check_stages(config: Any, *parts: str, divided: bool = True) -> None:
    """Check that there are stages, with one width and one of each of the `parts`, and that heads divide the widths."""
    values: dict[str, Any] = vars(config)
    stages, heads = config.stages, values.get("heads")
    if not stages:
        raise ConfigError("stages is (); expected at least one number, the blocks of a stage")
    for name in ("widths", *(("heads",) if isinstance(heads, tuple) else ()), *parts):
        if len(values[name]) != len(stages):
            raise ConfigError(
                f"{name} is {values[name]} for {len(stages)} stages; expected {len(stages)} numbers, one per stage"
            )
    if isinstance(heads, tuple) and divided:
        for width, count in zip(config.widths, heads, strict=True):
            check_heads(width, count)


def check_reductions(reductions: tuple[int, ...], levels: Sequence[Level]) -> None:
    """Check that each stage has the tokens that become one key."""
    least = max(ratio * level.stride[0] for ratio, level in zip(reductions, levels, strict=True))
    for ratio, level in zip(reductions, levels, strict=True):
        if min(level.grid) < ratio:
            raise ConfigError(
                f"a reduction of {ratio} for a grid of {level.grid[0]}×{level.grid[1]} tokens; expected at most "
                f"{min(level.grid)}, or images of at least {least}×{least} pixels"
            )


def list_stage_rates(last: float, stages: tuple[int, ...]) -> list[list[float]]:
    """The stochastic depth of the blocks of each stage, which grows linearly from 0 at the first block to `last`."""
    rates = iter([scale_rate(last, number, sum(stages)) for number in range(sum(stages))])
    return [[next(rates) for _ in range(depth)] for depth in stages]


def make_stage_blocks(
    config: Any,
    stage: int,
    hidden: int,
    make_attention: Callable[[int], nn.Module],
    *,
    norm_eps: float,
    kind: type[Block] = Block,
    activation: Activation = "gelu",
) -> nn.ModuleList:
    """The blocks of a stage of a config with stages, widths and heads, each with an attention made for its number."""
    blocks, width, heads = nn.ModuleList(), config.widths[stage], config.heads[stage]
    for number, rate in enumerate(list_stage_rates(config.stochastic_depth, config.stages)[stage]):
        dropout = config.dropout
        block = kind(
            width, heads, hidden, activation=activation, norm_eps=norm_eps, dropout=dropout, stochastic_depth=rate
        )
        block.set_submodule("attn", make_attention(number))
        blocks.append(block)
    return blocks


def name_blocks(stages: Sequence[int], block: str) -> list[list[str]]:
    """The names of the blocks of each stage; `block` is a name with the stage and the number."""
    return [[block.format(stage, number) for number in range(depth)] for stage, depth in enumerate(stages)]


def make_halved_levels(
    grid: Grid, stride: Grid, widths: Sequence[int], blocks: Sequence[Sequence[str]]
) -> tuple[Level, ...]:
    """One level per stage, from the `grid` of the first one, which each next stage halves, rounded up."""
    levels = list[Level]()
    for width, names in zip(widths, blocks, strict=True):
        levels.append(Level(grid=grid, stride=stride, width=width, blocks=tuple(names)))
        grid, stride = halve_grid(grid), (2 * stride[0], 2 * stride[1])
    return tuple(levels)


def make_stage_levels(
    image: Size, stride: int, widths: tuple[int, ...], stages: tuple[int, ...], block: str, factor: int = 2
) -> tuple[Level, ...]:
    """One level per stage; the image is a multiple of the last stride. `block` is a name with its stage and number."""
    strides = [stride * factor**stage for stage in range(len(stages))]
    check_grid(pair(image), pair(strides[-1]))
    return tuple(
        Level(grid=check_grid(pair(image), pair(stride)), stride=pair(stride), width=widths[stage], blocks=tuple(names))
        for stage, (stride, names) in enumerate(zip(strides, name_blocks(stages, block), strict=True))
    )


def halve_grid(grid: Grid) -> Grid:
    """Rows and columns of every second position: rounded up."""
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def flatten_map(x: Tensor) -> Tensor:
    """Each position of a map as a token, row by row: (B, D, h, w) → (B, n, D)."""
    return x.flatten(2).transpose(1, 2)


def unflatten_map(tokens: Tensor, grid: Grid) -> Tensor:
    """(B, n, D) → (B, D, h, w)"""
    return tokens.transpose(1, 2).unflatten(2, grid)


class StagedModel(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the mean of the tokens (B, D).

    A model that halves its grid from stage to stage. It writes `run_stages`; with another head, `logits` too.
    """

    one_size_export_reason = "its windows are cut for one grid"
    no_masking_reason = "its levels have different grids"
    no_dropping_reason = "its stages need a complete grid"

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        """The tokens after each stage, and their grid: (B, n, D) → (B, n, D), …"""
        raise NotImplementedError

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        after = x
        for after, _ in self.run_stages(x, grid):  # noqa: B007  # the last one is returned, the others are freed
            pass
        return after

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        return [unflatten_map(x, grid) for x, grid in self.run_stages(*self.embed(images))]


class PegModel(StagedModel):
    """A model whose stages begin with a convolution that makes their tokens, and a block that a Peg follows."""

    stage_list = "blocks"  # the module with the blocks of each stage

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        self.check_images(images)
        return self.patch_embeds[0](images)

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        for stage, blocks in enumerate(self.get_submodule(self.stage_list).children()):
            if stage:
                x, grid = self.patch_embeds[stage](unflatten_map(x, grid))
            x = self.pos_drop(x)
            for number, block in enumerate(blocks.children()):
                x = block(x, grid)
                x = x if number else self.pos_block[stage](x, grid)
            yield x, grid


class ConvNet(ImageModel):
    """An image model without attention; it takes images of any size. A family writes `run_stem` and `logits`."""

    final_norm = ""
    no_maps_reason = "it has no attention"
    no_masking_reason = no_dropping_reason = "it has no patches"
    stage_names: Sequence[str]  # names of the stages in the module

    def declare_stages(self, image: Grid, stride: int, widths: Sequence[int], blocks: Sequence[Sequence[str]]) -> None:
        """Set levels and sizes; `stride` is that of the first stage, `widths` and names of `blocks` are per stage."""
        grid = ((image[0] - 1) // stride + 1, (image[1] - 1) // stride + 1)  # rounded up
        self.levels = make_halved_levels(grid, (stride, stride), widths, blocks)
        side = 2 ** (len(widths) + 1) + 1  # leaves more than one position in the last map
        self.sizes = ImageSizes(multiple=(1, 1), minimum=(side, side))

    def run_stem(self, images: Tensor) -> Tensor:
        """The input of the first stage."""
        raise NotImplementedError

    def run_end(self, x: Tensor) -> Tensor:
        """What the head reads, from the last feature map: by default the same."""
        return x

    def encode(self, images: Tensor, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        """The last feature map as the head reads it, each position a token: (B, C, H, W) → (B, h·w, D)."""
        self.check_images(images)
        x = self.run_stem(images)
        for name in self.stage_names:  # not by `feature_maps`, which keeps the memory of all maps
            x = self.get_submodule(name)(x)
        return flatten_map(self.run_end(x))

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The output of each stage: (B, C, H, W) → [(B, D, h, w), …]."""
        self.check_images(images)
        maps = [self.run_stem(images)]
        for name in self.stage_names:
            maps.append(self.get_submodule(name)(maps[-1]))
        return maps[1:]
