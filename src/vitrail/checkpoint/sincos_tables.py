"""Fixed position tables of MAE and MoCo v3, by which their files are recognised; they differ in the order of axes."""

from math import isqrt

import torch
from torch import Tensor

TABLE_TOLERANCE = 1e-3  # tables may be stored in half precision


def make_sincos_table(side: int, width: int, *, columns_first: bool) -> Tensor:
    """Sines and cosines of one axis, then of the other, after a zero row for the class token: (1, 1 + side², D).

    MAE puts the columns first, MoCo v3 the rows.
    """
    rates = 1 / 10_000 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates
    axis = torch.cat((angles.sin(), angles.cos()), dim=1)
    rows, columns = axis.repeat_interleave(side, dim=0), axis.repeat(side, 1)
    patches = torch.cat((columns, rows) if columns_first else (rows, columns), dim=1)
    return torch.cat((torch.zeros(1, patches.shape[1]), patches))[None]


def is_sincos_table(table: Tensor | None, *, columns_first: bool) -> bool:
    """Whether this is the table for a square of at least 2×2 patches."""
    if table is None or table.ndim != 3 or table.shape[0] != 1 or not table.is_floating_point() or table.is_meta:
        return False
    side, width = isqrt(max(table.shape[1] - 1, 0)), table.shape[2]
    if side < 2 or side * side + 1 != table.shape[1] or width % 4 or not width:
        return False
    return torch.allclose(
        table.float(), make_sincos_table(side, width, columns_first=columns_first), rtol=0, atol=TABLE_TOLERANCE
    )
