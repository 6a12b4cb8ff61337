"""Models of several stages: checks of their configs, their levels, tokens as maps, and what such models share.

B batch, n = h·w tokens, D width.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import Size, check_grid, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level


def check_stages(stages: tuple[int, ...], **parts: tuple[float, ...]) -> None:
    """Check that there are stages, and as many of each of the other parts."""
    if not stages:
        raise ConfigError("stages is (); expected at least one number, the blocks of a stage")
    for name, values in parts.items():
        if len(values) != len(stages):
            raise ConfigError(
                f"{name} is {values} for {len(stages)} stages; expected {len(stages)} numbers, one per stage"
            )


def check_reductions(reductions: tuple[int, ...], levels: Sequence[Level]) -> None:
    """Check that each stage has the tokens that become one key."""
    least = max(ratio * level.stride[0] for ratio, level in zip(reductions, levels, strict=True))
    for ratio, level in zip(reductions, levels, strict=True):
        if min(level.grid) < ratio:
            raise ConfigError(
                f"a reduction of {ratio} for a grid of {level.grid[0]}×{level.grid[1]} tokens; expected at most "
                f"{min(level.grid)}, or images of at least {least}×{least} pixels"
            )


def make_stage_levels(
    image: Size, stride: int, widths: tuple[int, ...], stages: tuple[int, ...], block: str, factor: int = 2
) -> tuple[Level, ...]:
    """One level per stage; the image is a multiple of the last stride. `block` is a name with its stage and number."""
    strides = [stride * factor**stage for stage in range(len(stages))]
    check_grid(pair(image), pair(strides[-1]))
    return tuple(
        Level(
            grid=check_grid(pair(image), pair(stride)),
            stride=pair(stride),
            width=widths[stage],
            blocks=tuple(block.format(stage, number) for number in range(stages[stage])),
        )
        for stage, stride in enumerate(strides)
    )


def halve_grid(grid: Grid) -> Grid:
    """Rows and columns of every second place: rounded up."""
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def flatten_map(x: Tensor) -> Tensor:
    """Each place of a map as a token, row by row: (B, D, h, w) → (B, n, D)."""
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

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of all tokens: (B, n, D) → (B, classes)."""
        return self.head(tokens.mean(1))


class ConvNet(ImageModel):
    """An image model without attention; it takes images of any size. A family writes `run_stem` and `logits`."""

    final_norm = ""
    no_maps_reason = "it has no attention"
    no_masking_reason = no_dropping_reason = "it has no patches"
    stage_names: Sequence[str]  # names of the stages in the module

    def declare_stages(self, image: Grid, stride: int, widths: Sequence[int], blocks: Sequence[Sequence[str]]) -> None:
        """Set levels and sizes; `stride` is that of the first stage, `widths` and names of `blocks` are per stage."""
        strides = [stride * 2**stage for stage in range(len(widths))]
        self.levels = tuple(
            Level(
                grid=((image[0] - 1) // each + 1, (image[1] - 1) // each + 1),  # rounded up
                stride=(each, each),
                width=width,
                blocks=tuple(names),
            )
            for each, width, names in zip(strides, widths, blocks, strict=True)
        )
        side = 2 ** (len(widths) + 1) + 1  # leaves more than one position in the last map
        self.sizes = ImageSizes(multiple=(1, 1), minimum=(side, side))

    def run_stem(self, images: Tensor) -> Tensor:
        """The input of the first stage."""
        raise NotImplementedError

    def encode(self, images: Tensor, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        """The last feature map, each of its positions a token: (B, C, H, W) → (B, h·w, D)."""
        self.check_images(images)
        x = self.run_stem(images)
        for name in self.stage_names:  # not by `feature_maps`, which keeps the memory of all maps
            x = self.get_submodule(name)(x)
        return x.flatten(2).transpose(1, 2)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The output of each stage: (B, C, H, W) → [(B, D, h, w), …]."""
        self.check_images(images)
        maps = [self.run_stem(images)]
        for name in self.stage_names:
            maps.append(self.get_submodule(name)(maps[-1]))
        return maps[1:]
