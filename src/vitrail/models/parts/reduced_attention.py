"""Attention between two grids, such as to fewer keys than queries (Wang 2021).

B batch, n = h·w tokens, R ratio, k = n/R² keys, D width, H heads, K width of a head.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import AttentionLayer, split_heads
from vitrail.layers.positions import Grid
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

    def project(
        self, x: Tensor, grid: Grid | None = None, mask: Tensor | None = None, queries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        assert grid is not None
        assert queries is None, "there are no prefix tokens to compute alone"
        k, v = self.kv(self.reduce(x, grid)).chunk(2, dim=-1)
        return split_heads(self.q(x), self.heads), split_heads(k, self.heads), split_heads(v, self.heads), mask
