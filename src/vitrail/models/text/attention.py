"""Multi-head attention over text (Vaswani 2017, section 3.2), with keys and values that can be computed once and kept.

B batch, M queries, N keys, D width, H heads, K and V the widths of one head's keys and values.
"""

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.layers.attention import attention, causal_mask, join_masks, masked_softmax, merge_heads, split_heads
from vitrail.models.base.init import init_stacked_linear

Score = Literal["scaled_dot", "dot", "additive"]


class MultiHeadAttention(nn.Module):
    """Concat(head_1, …, head_H)·W_O, where head_i = softmax(score(q_i, k_i))·v_i: what self- and cross-attention share.

    score(q, k) is q·k/√K (scaled_dot), q·k (dot), or aᵀ·tanh(q + k) with a vector a for each head (additive).
    """

    def __init__(
        self, width: int, heads: int, key_width: int, value_width: int, score: Score, dropout: float, *, bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.score, self.dropout = heads, score, dropout
        self.widths = (heads * key_width, heads * value_width)
        self.scale = 1 / math.sqrt(key_width) if score == "scaled_dot" else 1.0
        self.score_vector = nn.Parameter(torch.empty(heads, key_width)) if score == "additive" else None
        self.proj = nn.Linear(heads * value_width, width, bias=bias)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """The weighted mean of the values, of all heads, projected: (B, H, M, K), … → (B, M, D)."""
        return self.proj(merge_heads(self.attend(q, k, v, mask, causal=causal)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """The weighted mean of the values: (B, H, M, K), … → (B, H, M, V)."""
        dropout = self.dropout if self.training else 0.0
        if self.score_vector is None:
            return attention(q, k, v, mask, dropout, causal=causal, scale=self.scale)
        return nn.functional.dropout(self.weigh(q, k, mask, causal=causal), dropout) @ v

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """The probabilities that `mix` multiplies the values by: (B, H, M, N), each row sums to 1."""
        if self.score_vector is None:
            scores = q @ k.transpose(-2, -1) * self.scale
        else:
            scores = (q[:, :, :, None] + k[:, :, None]).tanh() @ self.score_vector[:, None, :, None]  # (B, H, M, N, 1)
            scores = scores[..., 0]
        before = causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
        return masked_softmax(scores, join_masks(mask, before))

    def draw_weights(self) -> None:
        """Xavier-uniform for each of q, k and v: as one matrix their weights would be too small."""
        keys, values = self.widths
        for name, layer in self.named_children():
            parts = {"qkv": [keys, keys, values], "kv": [keys, values]}
            if isinstance(layer, nn.Linear):
                init_stacked_linear(layer, parts.get(name, [layer.out_features]))
        if self.score_vector is not None:
            nn.init.normal_(self.score_vector, std=self.score_vector.shape[-1] ** -0.5)


class TextSelfAttention(MultiHeadAttention):
    """Queries, keys and values from the same tokens: (B, N, D) → (B, N, D); if causal, from those before only."""

    def __init__(
        self,
        width: int,
        heads: int,
        key_width: int,
        value_width: int,
        *,
        causal: bool,
        score: Score = "scaled_dot",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(width, heads, key_width, value_width, score, dropout, bias=bias)
        self.causal = causal
        self.parts = [self.widths[0], *self.widths]  # rows: all of q, then k, then v; in each head after head
        self.qkv = nn.Linear(width, sum(self.parts), bias=bias)

    def project(self, x: Tensor) -> list[Tensor]:
        return [split_heads(part, self.heads) for part in self.qkv(x).split(self.parts, dim=-1)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        return self.mix(q, k, v, mask, causal=self.causal)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention probabilities of `forward`: (B, H, N, N)."""
        q, k, _ = self.project(x)
        return self.weigh(q, k, mask, causal=self.causal)


class CrossAttention(MultiHeadAttention):
    """Queries from x, keys and values from a memory, which are computed once: (B, M, D) → (B, M, D)."""

    def __init__(
        self,
        width: int,
        heads: int,
        key_width: int,
        value_width: int,
        *,
        memory_width: int,
        score: Score = "scaled_dot",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(width, heads, key_width, value_width, score, dropout, bias=bias)
        self.q = nn.Linear(width, self.widths[0], bias=bias)
        self.kv = nn.Linear(memory_width, sum(self.widths), bias=bias)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory: (B, N, memory_width) → (B, H, N, K), (B, H, N, V)."""
        k, v = self.kv(memory).split(self.widths, dim=-1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        return self.mix(split_heads(self.q(x), self.heads), *memory, mask)

    def weights(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """The attention probabilities of `forward`: (B, H, M, N)."""
        return self.weigh(split_heads(self.q(x), self.heads), memory[0], mask)


@contextmanager
def collect_weights(modules: Iterable[Any]) -> Generator[list[Tensor]]:
    """The attention probabilities of these modules, recomputed from their inputs in the passes of this context."""
    collected = list[Tensor]()

    def collect(module: Any, inputs: tuple[Any, ...]) -> None:
        collected.append(module.weights(*inputs))

    hooks = [module.register_forward_pre_hook(collect) for module in modules]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()
