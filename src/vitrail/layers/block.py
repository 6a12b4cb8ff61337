"""The pre-norm encoder block (Dosovitskiy 2020, eq. 2 and 3), its MLP, layer scale and stochastic depth.

B batch, N tokens, D width.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.layers.attention import SelfAttention
from vitrail.layers.positions import Grid, RelativePositions, RotaryPositions

Activation = Literal["gelu", "gelu_tanh", "swiglu"]


class Block(nn.Module):
    """z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z': (B, N, D) → (B, N, D), or only the first `queries` tokens of it."""

    recompute = False  # set on a block: trades time for memory, activations are computed again in the backward pass

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        *,
        activation: Activation = "gelu",
        qkv_bias: bool = True,
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        positions: RelativePositions | RotaryPositions | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, norm_eps)
        self.attn = SelfAttention(width, heads, bias=qkv_bias, dropout=attention_dropout, positions=positions)
        self.drop = nn.Dropout(dropout)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = nn.LayerNorm(width, norm_eps)
        if activation == "swiglu":
            self.mlp = SwiGlu(width, mlp_width, dropout=dropout)
        else:
            self.mlp = Mlp(width, mlp_width, tanh=activation == "gelu_tanh", dropout=dropout)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path = StochasticDepth(stochastic_depth)

    def forward(
        self, x: Tensor, grid: Grid | None = None, queries: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, grid, queries, mask, use_reentrant=False)
        return self.compute(x, grid, queries, mask)

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        mixed = self.attn(self.norm1(x), grid, mask=mask, queries=queries)
        x = x[:, :queries] + self.drop_path(self.ls1(self.drop(mixed)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class Mlp(nn.Module):
    """fc2(GELU(fc1(x))): (B, N, D) → (B, N, D). Google's weights need the tanh approximation of GELU."""

    def __init__(self, width: int, hidden: int, *, tanh: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU("tanh" if tanh else "none")
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SwiGlu(nn.Module):
    """fc2(SiLU(a)·b), where a and b are the halves of fc1(x) (Shazeer 2020): (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, hidden: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(F.silu(a) * b)))


class LayerScale(nn.Module):
    """A learned factor for each channel, small at first, so that deep networks start as the identity (Touvron 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class StochasticDepth(nn.Module):
    """In training, drops the branch of a sample with the given rate and scales the others up to match (Huang 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        return x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)
