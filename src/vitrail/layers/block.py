"""The pre-norm encoder block (Dosovitskiy 2020, eq. 2 and 3). B batch, N tokens, D width."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.layers.attention import SelfAttention
from vitrail.layers.mlp import Mlp, SwiGlu
from vitrail.layers.positions import Grid, RelativePositions, RotaryPositions
from vitrail.layers.residual import LayerScale, StochasticDepth

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
