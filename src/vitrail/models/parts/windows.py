"""Attention within windows of a grid: windows are folded into the batch, so that queries and keys stay 4-D.

B batch, n = h·w tokens, W windows of m = r·c tokens each, D width, H heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import isqrt
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, attention, join_masks, merge_heads
from vitrail.layers.positions import Grid
from vitrail.models.base.checkpoint_side import TensorTransform

Function = TypeVar("Function", bound=Callable[..., Any])


def remember_tensor(make: Function) -> Function:
    """Keep the last results of a function of sizes and a device; its tensors must not be changed in place.

    Tensors made while compiling or exporting are symbolic, so they are not kept.
    """
    kept = lru_cache(maxsize=32)(torch.inference_mode(mode=False)(make))  # else it could not be used in training later

    @wraps(make)
    def remembered(*args: Any) -> Any:
        return make(*args) if torch.compiler.is_compiling() else kept(*args)

    return cast("Function", remembered)


def check_windows(windows: tuple[int, ...], image: Grid, stride: Grid, multiple: Grid) -> None:
    """Check that no window exceeds the grid of the first stage; it may exceed later ones, to which it shrinks.

    `stride` has the pixels per token of the first stage; images are made of multiples.
    """
    window, grid = max(windows), tuple(-(-side // step) for side, step in zip(image, stride, strict=True))
    if window > max(grid):
        least = [-(-window * step // by) * by for step, by in zip(stride, multiple, strict=True)]
        raise ConfigError(
            f"a window of {window}×{window} for a grid of {grid[0]}×{grid[1]} tokens in the first stage; expected at "
            f"most {max(grid)}×{max(grid)}: use a smaller window, or images of {least[0]}×{least[1]} pixels or more"
        )


@dataclass(frozen=True)
class Windows:
    """A grid cut into windows from the top left; the last ones are padded with zeros.

    With a `shift`, the first windows start so many rows and columns later, and the last ones hold, next to the end of
    the grid, its beginning: `regions` tells these parts apart. With an `interval`, a window has every second, third, …
    row and column, so that windows interleave.
    """

    grid: Grid
    size: Grid  # rows and columns of a window
    shift: Grid = (0, 0)
    interval: Grid = (1, 1)  # rows and columns from one token of a window to the next

    @property
    def counts(self) -> Grid:
        """Windows along the rows and the columns."""
        rows, columns = self.interval
        return (
            -(-self.grid[0] // (self.size[0] * rows)) * rows,
            -(-self.grid[1] // (self.size[1] * columns)) * columns,
        )

    @property
    def padding(self) -> Grid:
        """Rows and columns that are added to the grid."""
        rows, columns = (count * side for count, side in zip(self.counts, self.size, strict=True))
        return rows - self.grid[0], columns - self.grid[1]

    def split(self, x: Tensor) -> Tensor:
        """(B, n, D) → (B·W, m, D)"""
        x = x.unflatten(1, self.grid)
        if any(self.padding):
            x = F.pad(x, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        if self.interval != (1, 1):
            (rows, columns), (down, right) = self.size, self.interval
            x = x.unflatten(2, (-1, columns, right)).unflatten(1, (-1, rows, down))  # (B, h/ri, r, i, w/cj, c, j, D)
            return x.permute(0, 1, 4, 3, 6, 2, 5, 7).flatten(5, 6).flatten(0, 4)
        x = x.unflatten(2, (-1, self.size[1])).unflatten(1, (-1, self.size[0]))  # (B, h/r, r, w/c, c, D)
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`, without the padding: (B·W, m, D) → (B, n, D)."""
        if self.interval != (1, 1):
            (down, right), (rows, columns) = self.interval, self.counts
            x = x.unflatten(1, self.size).unflatten(0, (-1, rows // down, columns // right, down, right))
            x = x.permute(0, 1, 5, 3, 2, 6, 4, 7).flatten(4, 6).flatten(1, 3)
        else:
            x = x.unflatten(0, (-1, *self.counts)).unflatten(3, self.size)  # (B, h/r, w/c, r, c, D)
            x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            x = x.roll(self.shift, (1, 2))
        if any(self.padding):
            x = x[:, : self.grid[0], : self.grid[1]]
        return x.flatten(1, 2)

    def regions(self, device: torch.device | None = None) -> Tensor | None:
        """Whether two tokens of a window are neighbors on the grid, (W, m, m); None if all are."""
        if not any(self.shift):
            return None
        sides = [extent + more for extent, more in zip(self.grid, self.padding, strict=True)]
        rows, columns = (
            (torch.arange(side, device=device) < shift).float() for side, shift in zip(sides, self.shift, strict=True)
        )  # what is moved to the end
        whole = Windows(grid=(sides[0], sides[1]), size=self.size, shift=self.shift)
        region = whole.split((2 * rows[:, None] + columns).reshape(1, -1, 1))  # (W, m, 1)
        return region == region.mT

    def places(self, device: torch.device | None = None) -> Tensor:
        """Whether a place of a window is a token, not padding: (W, m)."""
        return self.split(torch.ones(1, self.grid[0] * self.grid[1], 1, device=device))[..., 0] > 0


@remember_tensor
def hide_regions(windows: Windows, device: torch.device) -> Tensor | None:
    """A mask that is added, −∞ between regions: (W, 1, m, m); None if there is one region."""
    regions = windows.regions(device)
    if regions is None:
        return None
    return torch.zeros_like(regions, dtype=torch.float).masked_fill_(~regions, -math.inf)[:, None]


@dataclass(frozen=True)
class TokenWindows(Windows):
    """Windows that each have a token of their own before their places; all windows are whole."""

    def split(self, x: Tensor) -> Tensor:
        """(B, W + n, D) → (B·W, 1 + m, D)"""
        count = math.prod(self.counts)
        return torch.cat([x[:, :count].flatten(0, 1)[:, None], super().split(x[:, count:])], dim=1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        tokens = x[:, 0].unflatten(0, (-1, math.prod(self.counts)))
        return torch.cat([tokens, super().join(x[:, 1:])], dim=1)

    def places(self, device: torch.device | None = None) -> Tensor:
        return torch.ones(math.prod(self.counts), 1 + math.prod(self.size), dtype=torch.bool, device=device)


class OffsetBias(nn.Module):
    """A learned bias of the attention per head and offset, key − query, in rows and columns: (H, 2r−1, 2c−1)."""

    def __init__(self, heads: int, size: Grid) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(heads, 2 * size[0] - 1, 2 * size[1] - 1))

    def forward(self, size: Grid) -> Tensor:
        """For all pairs of tokens of a window, which may be smaller than the largest: (H, m, m)."""
        return look_up_offsets(self.table, size)


def init_offset_biases(model: nn.Module) -> None:
    """Draw the tables of all biases by offset."""
    for module in model.modules():
        if isinstance(module, OffsetBias):
            nn.init.trunc_normal_(module.table, std=0.02)


def mirror_offsets(table: Tensor) -> Tensor:
    """A table by offset from one by distance in rows and columns: (H, r, c) → (H, 2r−1, 2c−1)."""
    table = torch.cat([table[:, 1:].flip(1), table], dim=1)
    return torch.cat([table[:, :, 1:].flip(2), table], dim=2)


def look_up_offsets(table: Tensor, size: Grid) -> Tensor:
    """The entry for the offset of each key from each query in a window: (H, 2r−1, 2c−1) → (H, m, m)."""
    row_middle, column_middle = table.shape[1] // 2, table.shape[2] // 2  # offset 0
    if size[0] > row_middle + 1 or size[1] > column_middle + 1:
        raise ConfigError(
            f"a window of {size[0]}×{size[1]}; expected at most {row_middle + 1}×{column_middle + 1}, as in the table"
        )
    index = find_offsets(size, (table.shape[1], table.shape[2]), table.device)
    count = size[0] * size[1]
    return table.flatten(1).index_select(1, index).unflatten(1, (count, count))


@remember_tensor
def find_offsets(size: Grid, table: Grid, device: torch.device) -> Tensor:
    """The place of each offset, key − query, in a flattened table of rows and columns: (m·m)."""
    rows, columns = (torch.arange(side, device=device) for side in size)
    place = (rows[:, None] * table[1] + columns).flatten()  # in the table's row length
    return (place - place[:, None] + table[0] // 2 * table[1] + table[1] // 2).flatten()


class WindowAttention(SelfAttention):
    """Self-attention within windows of a grid, with a bias by position: (B, n, D) → (B, n, D).

    A grid smaller than a window is one window. Of two blocks, the second one usually shifts its windows by half their
    size, so that neighbors across a border meet. Attention maps are those of the windows: (B·W, H, m, m).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        window: Grid,
        position_bias: nn.Module | None = None,
        *,
        shifted: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(width, heads, bias=bias, dropout=dropout)
        self.window, self.shifted = window, shifted
        self.position_bias = position_bias  # called with the size of a window, returns (H, m, m)

    def cut(self, grid: Grid) -> Windows:
        """The windows of a grid."""
        size = (min(self.window[0], grid[0]), min(self.window[1], grid[1]))
        halves = [side // 2 if self.shifted and extent > side else 0 for side, extent in zip(size, grid, strict=True)]
        return Windows(grid, size, (halves[0], halves[1]))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        """q, k, v of all windows, (B·W, H, m, K), and the bias by position, hidden between regions."""
        if grid is None or grid[0] * grid[1] != x.shape[1]:
            raise ConfigError(f"grid {grid} for {x.shape[1]} tokens; expected (rows, columns) of as many tokens")
        assert mask is None, "windows have masks of their own"
        assert queries is None, "windows have no prefix tokens to compute alone"
        windows = self.cut(grid)
        q, k, v, _ = super().project(windows.split(x))
        by_place = None if self.position_bias is None else self.position_bias(windows.size)
        hidden = hide_regions(windows, x.device)
        if hidden is not None:
            added = hidden.to(q.dtype) if by_place is None else by_place + hidden.to(by_place.dtype)  # (W, H, m, m)
            return q, k, v, added.repeat(q.shape[0] // len(added), 1, 1, 1)
        return q, k, v, None if by_place is None else by_place[None]

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        y = merge_heads(self.attend(*self.project(x, grid, mask, queries)))
        assert grid is not None
        return self.cut(grid).join(self.proj(y))


class WindowMixing(nn.Module):
    """Attention of windows to each other, a module so that its weights can be captured: (B, H, W, V) → (B, H, W, V)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout=self.dropout if self.training else 0.0)


class MaskedWindowAttention(WindowAttention):
    """Attention within windows, in which no token attends to the padding of its window."""

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        q, k, v, mask = super().project(x, grid, mask, queries)
        assert grid is not None
        windows = self.cut(grid)
        if any(windows.padding):
            places = windows.places(x.device)
            places = (places | ~places.any(-1, keepdim=True))[:, None, None]  # (W, 1, 1, m); one of padding alone: all
            mask = join_masks(
                mask, places.repeat(q.shape[0] // places.shape[0], 1, 1, 1).expand(-1, -1, q.shape[2], -1)
            )
        return q, k, v, mask


def offsets_to_ours(parts: list[Tensor]) -> Tensor:
    """Of query − key, ((2r−1)·(2c−1), H) → of key − query, (H, 2r−1, 2c−1), for square windows."""
    side_length = isqrt(len(parts[0]))
    return parts[0].T.reshape(-1, side_length, side_length).flip(1, 2)


OFFSETS_BY_QUERY = TensorTransform(offsets_to_ours, lambda table, _: [table.flip(1, 2).flatten(1).T])
