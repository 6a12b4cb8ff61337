"""Models of several stages: checks of their configs, their levels, and tokens as maps.

B batch, n = h·w tokens, D width.
"""

from collections.abc import Sequence

from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.layers.positions import Grid
from vitrail.models.checks import check_grid, pair
from vitrail.models.contract import Level


def check_stages(stages: tuple[int, ...], **parts: tuple[float, ...]) -> None:
    """Check that there are stages, and as many of each of the other parts."""
    if not stages:
        raise ConfigError("stages is (); expected at least one number, the blocks of a stage")
    for name, values in parts.items():
        if len(values) != len(stages):
            raise ConfigError(f"{len(stages)} stages and {len(values)} {name}; expected one per stage")


def make_stage_levels(
    image: Grid, strides: Sequence[int], widths: tuple[int, ...], stages: tuple[int, ...], block: str
) -> tuple[Level, ...]:
    """One level per stage; the image is a multiple of the last stride. `block` is a name with its stage and number."""
    check_grid(image, pair(strides[-1]))
    return tuple(
        Level(
            grid=check_grid(image, pair(stride)),
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
