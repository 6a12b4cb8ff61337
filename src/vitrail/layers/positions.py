"""Positions of tokens: tables added to the tokens, or relative and rotary positions inside the attention.

A table is (T, E + h·w, D): T layers, E prefix tokens (class, registers), then the grid's h·w patches row by row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]  # rows, columns


def sinusoid(positions: Tensor, width: int, base: float = 10_000.0) -> Tensor:
    """PE(pos, 2i) = sin(pos / base^(2i/width)), PE(pos, 2i+1) = cos(same): (N,) → (N, width) (Vaswani 2017, 3.5)."""
    rates = torch.exp(torch.arange(0, width, 2, device=positions.device).float() * (-math.log(base) / width))
    angles = positions[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]


def sinusoid_1d(grid: Grid, width: int) -> Tensor:
    """Patches counted row by row, as if the image were a sentence: (h·w, D)."""
    return sinusoid(torch.arange(grid[0] * grid[1]), width)


def sinusoid_2d(grid: Grid, width: int) -> Tensor:
    """Half of the width encodes the column, half the row: (h·w, D)."""
    return join_axes(sinusoid(torch.arange(grid[0]), width // 2), sinusoid(torch.arange(grid[1]), width // 2))


def join_axes(rows: Tensor, columns: Tensor) -> Tensor:
    """One table from one per axis, columns in the first half: (…, h, D/2), (…, w, D/2) → (…, h·w, D)."""
    rows = rows.unsqueeze(-2).expand(*rows.shape[:-1], columns.shape[-2], -1)  # (…, h, w, D/2)
    columns = columns.unsqueeze(-3).expand_as(rows)
    return torch.cat((columns, rows), dim=-1).flatten(-3, -2)


def resample(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """The table for another grid, bicubic and antialiased; prefix rows stay as they are: (T, E + h·w, D)."""
    in_symbols = any(isinstance(side, torch.SymInt) for side in new)  # in an export with dynamic sizes
    if not in_symbols and old == new:
        return table
    prefix, patches = table.tensor_split([table.shape[1] - old[0] * old[1]], dim=1)
    patches = patches.unflatten(1, old).permute(0, 3, 1, 2).float()
    if in_symbols:  # the same as two matrix products, which every runtime supports
        patches = bicubic_matrix(old[0], new[0]) @ patches @ bicubic_matrix(old[1], new[1]).T
    else:
        patches = F.interpolate(patches, size=new, mode="bicubic", antialias=True)
    return torch.cat((prefix, patches.to(table.dtype).flatten(2).transpose(1, 2)), dim=1)


def bicubic_matrix(old: int, new: int) -> Tensor:
    """Resampling weights from `old` to `new` places, bicubic (Keys 1981, a = −½) and antialiased: (new, old)."""
    step = old / new  # old places per new one
    distances = torch.arange(old) + 0.5 - (torch.arange(new)[:, None] + 0.5) * step
    t = (distances / torch.sym_max(step, 1.0)).abs()
    weights = torch.where(t < 1, (1.5 * t - 2.5) * t**2 + 1, ((2.5 - 0.5 * t) * t - 4) * t + 2) * (t < 2)
    return weights / weights.sum(1, keepdim=True)


class RelativePositions(nn.Module):
    """Extra attention from each query to an embedding of its offset from the key (Dosovitskiy 2020, appendix D.4).

    The paper counts offsets along the sequence; here they are (rows, columns), so that the table can be resampled.
    """

    def __init__(self, head_width: int, grid: Grid) -> None:
        super().__init__()
        self.span = (2 * grid[0] - 1, 2 * grid[1] - 1)  # offsets 1 − n … n − 1 along each axis
        self.offsets = nn.Parameter(torch.zeros(1, self.span[0] * self.span[1], head_width))

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        span = (2 * grid[0] - 1, 2 * grid[1] - 1)
        table = resample(self.offsets, self.span, span)[0]  # (R, K): R offsets
        rows, columns = torch.arange(grid[0], device=q.device), torch.arange(grid[1], device=q.device)
        place = (rows[:, None] * span[1] + columns).flatten()  # of each patch, in the table's row length
        index = place[:, None] - place + table.shape[0] // 2  # (n, n): the offset of every query from every key

        prefix = k.shape[2] - index.shape[0]  # prefix tokens have no position, so no offset
        scores = q[:, :, prefix:] @ table.T / math.sqrt(q.shape[-1])  # (B, H, n, R)
        bias = scores.gather(-1, index[: scores.shape[2]].expand(*scores.shape[:3], -1))
        return q, k, F.pad(bias, (prefix, 0, q.shape[2] - bias.shape[2], 0))


class RotaryPositions(nn.Module):
    """Rotates q and k by angles proportional to the position, so that q·k depends only on the offset (Su 2021).

    Axial, for images: half of the pairs of coordinates encode the column, half the row (Heo 2024).
    """

    def __init__(self, head_width: int, base: float = 100.0) -> None:
        super().__init__()
        self.head_width, self.base = head_width, base

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, None]:
        steps = torch.arange(0, self.head_width, 4, device=q.device).float()
        rates = self.base ** (steps / -self.head_width)  # base^(−4i/K)
        rows, columns = (torch.arange(n, device=q.device)[:, None] * rates for n in grid)
        angles = join_axes(rows, columns)  # (n, K/2)
        angles = F.pad(angles, (0, 0, k.shape[2] - angles.shape[0], 0))  # angle 0: prefix tokens are not rotated
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of coordinates (i, i + K/2) by its token's angle: (B, H, N, K)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[2]], sin[: x.shape[2]]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
