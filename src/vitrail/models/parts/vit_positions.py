"""The kinds of positions that a ViT has, by name: fixed tables, and positions inside the attention."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vitrail.layers.positions import Grid, RelativePositions, RotaryPositions, join_axes, sinusoid_1d, sinusoid_2d


def sinusoid_simple(grid: Grid, width: int) -> Tensor:
    """SimpleViT's table (Beyer 2022, arXiv 2205.01580): sines, then cosines of the column, then of the row: (h·w, D).

    Rates go from 1 to 1/10,000, the last one included. big_vision computes it, and its files do not contain it.
    """
    rates = 10_000.0 ** -torch.linspace(0, 1, width // 4)
    rows, columns = (torch.arange(count)[:, None] * rates for count in grid)
    return join_axes(*(torch.cat((angles.sin(), angles.cos()), dim=1) for angles in (rows, columns)))


FIXED_TABLES: Mapping[str, Callable[[Grid, int], Tensor]] = {
    "sincos": sinusoid_1d,
    "sincos_2d": sinusoid_2d,
    "sincos_simple": sinusoid_simple,
}


def in_attention(kind: str, head_width: int, grid: Grid) -> RelativePositions | RotaryPositions | None:
    """The kinds of positions inside the attention; None for any other kind."""
    if kind == "relative":
        return RelativePositions(head_width, grid)
    return RotaryPositions(head_width) if kind == "rotary" else None
