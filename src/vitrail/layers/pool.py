"""From all tokens to one vector by attention (class and mean pooling are one line each, in the model)."""

import torch
from torch import Tensor, nn

from vitrail.layers.attention import attention, attention_weights, merge_heads, split_heads
from vitrail.layers.block import Mlp


class AttentionPool(nn.Module):
    """Multi-head attention pooling (MAP): one learned query attends to all tokens, then an MLP: (B, N, D) → (B, D)."""

    def __init__(self, width: int, heads: int, mlp_width: int, *, tanh: bool = False, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.heads = heads
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, norm_eps)
        self.mlp = Mlp(width, mlp_width, tanh=tanh)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(self.latent).expand(x.shape[0], -1, -1)
        k, v = self.kv(x).chunk(2, dim=-1)
        return split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(merge_heads(attention(*self.project(x))))[:, 0]
        return x + self.mlp(self.norm(x))

    def weights(self, x: Tensor) -> Tensor:
        """The weight of each token in the vector: (B, H, 1, N)."""
        return attention_weights(*self.project(x)[:2])
