"""Attention that families share: keys on a coarser grid than queries (Wang 2021), keys without a bias, kept keys.

B batch, n = h·w tokens, R ratio, k = n/R² keys, D width, H heads, K and V the widths of one head's keys and values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import AttentionLayer, Mask, Projected, split_heads
from vitrail.layers.positions import Grid
from vitrail.models.base.checkpoint_side import TensorTransform
from vitrail.models.parts.stages import flatten_map, unflatten_map

NORM_EPS = 1e-5


@dataclass(frozen=True)
class ReducedGrid:
    """The grids of queries and keys."""

    queries: Grid
    keys: Grid


class TwoGridAttention(AttentionLayer):
    """Attention whose queries and keys are on two grids, for maps of it: a kind of it writes `reduce_grid`."""

    def reduce_grid(self, grid: Grid) -> ReducedGrid:
        """The grids of queries and keys for tokens on this grid."""
        raise NotImplementedError


class ReducedAttention(TwoGridAttention):
    """Attention of all tokens to keys of a strided convolution, or with a ratio of 1 to each other: (B, n, D).

    The convolution joins the tokens of each small square to one key.
    """

    def __init__(self, width: int, heads: int, ratio: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.ratio, self.dropout = heads, ratio, dropout
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
        self.proj = nn.Linear(width, width)
        self.sr = nn.Conv2d(width, width, ratio, ratio) if ratio > 1 else None
        self.norm = nn.LayerNorm(width, NORM_EPS) if ratio > 1 else None

    def reduce_grid(self, grid: Grid) -> ReducedGrid:
        """The grids of a layer; an error if there is no square of R×R tokens."""
        if min(grid) < self.ratio:
            raise ConfigError(
                f"a grid of {grid[0]}×{grid[1]} tokens; expected at least {self.ratio}×{self.ratio}, which become one "
                "key: use larger images or a smaller reduction"
            )
        return ReducedGrid(grid, (grid[0] // self.ratio, grid[1] // self.ratio))

    def reduce(self, x: Tensor, grid: Grid) -> Tensor:
        """The tokens that keys and values are made of: (B, n, D) → (B, k, D)."""
        if self.sr is None or self.norm is None:
            return x
        self.reduce_grid(grid)
        return self.norm(flatten_map(self.sr(unflatten_map(x, grid))))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        assert grid is not None
        assert queries is None, "there are no prefix tokens to compute alone"
        k, v = self.kv(self.reduce(x, grid)).chunk(2, dim=-1)
        return split_heads(self.q(x), self.heads), split_heads(k, self.heads), split_heads(v, self.heads), mask


class KeylessBiasLinear(nn.Linear):
    """q, k and v in one matrix, with a bias of q and v only: (…, D) → (…, 3·D)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, bias=False)
        self.qv_bias = nn.Parameter(torch.empty(2 * width))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        q_bias, v_bias = self.qv_bias.chunk(2)
        return F.linear(input, self.weight, torch.cat([q_bias, torch.zeros_like(q_bias), v_bias]))


def drop_key_bias(parts: list[Tensor]) -> Tensor:
    """Of a file with a bias of k, too, which the code that it belongs to sets to zero in every pass."""
    q_bias, _, v_bias = parts[0].chunk(3)
    return torch.cat([q_bias, v_bias])


def add_key_bias(bias: Tensor, _: int) -> list[Tensor]:
    q_bias, v_bias = bias.chunk(2)
    return [torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])]


QV_IN_QKV = TensorTransform(drop_key_bias, add_key_bias)


@dataclass
class KeyValues:
    """Keys (B, H, n, K) and values (B, H, n, V) of one layer, of which `length` are set; written in place."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def allocate(cls, shape: tuple[int, int, int], key_width: int, value_width: int, like: Tensor) -> "KeyValues":
        """Room for `shape` (B, H, n), with the device and dtype of `like`."""
        return cls(like.new_empty((*shape, key_width)), like.new_empty((*shape, value_width)))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens, and return all so far."""
        start, added = self.length, k.shape[2]
        self.keys.narrow(2, start, added).copy_(k)
        self.values.narrow(2, start, added).copy_(v)
        self.length = start + added
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)
