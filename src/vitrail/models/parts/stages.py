"""Models of several stages: checks of their configs, and tokens as maps.

B batch, n = h·w tokens, D width.
"""

from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.layers.positions import Grid


def check_stages(stages: tuple[int, ...], **parts: tuple[int, ...]) -> None:
    """Check that there are stages, and as many of each of the other parts."""
    if not stages:
        raise ConfigError("stages is (); expected at least one number, the blocks of a stage")
    for name, values in parts.items():
        if len(values) != len(stages):
            raise ConfigError(f"{len(stages)} stages and {len(values)} {name}; expected one per stage")


def halve_grid(grid: Grid) -> Grid:
    """Rows and columns of every second place: rounded up."""
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def flatten_map(x: Tensor) -> Tensor:
    """Each place of a map as a token, row by row: (B, D, h, w) → (B, n, D)."""
    return x.flatten(2).transpose(1, 2)


def unflatten_map(tokens: Tensor, grid: Grid) -> Tensor:
    """(B, n, D) → (B, D, h, w)"""
    return tokens.transpose(1, 2).unflatten(2, grid)
