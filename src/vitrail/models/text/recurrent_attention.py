"""The attention of a recurrent decoder: one state asks, all vectors of the memory are compared with it.

B batch, N tokens of the memory, D hidden width of the memory and of the state, A width of the attention.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.layers.attention import masked_softmax

RecurrentScore = Literal["dot", "general", "concat"]


class RecurrentAttention(nn.Module):
    """context = Σ_j softmax_j(score(s, h_j))·h_j: state s (B, D), memory h (B, N, D) → context (B, D), weights (B, N).

    dot: s·h (Luong 2015). general: sᵀ·W·h (Luong 2015). concat: vᵀ·tanh(W·s + U·h), the score of Bahdanau 2015, which
    Luong writes as vᵀ·tanh(W·[s; h]). W·h and U·h do not depend on the state: they are computed once, as keys.
    """

    def __init__(self, hidden: int, width: int, score: RecurrentScore) -> None:
        super().__init__()
        additive = score == "concat"
        self.query = nn.Linear(hidden, width, bias=False) if additive else nn.Identity()  # W of concat
        keys = {"dot": 0, "general": hidden, "concat": width}[score]
        self.keys = nn.Linear(hidden, keys, bias=False) if keys else nn.Identity()  # W of general, U of concat
        self.score_vector = nn.Parameter(torch.empty(width)) if additive else None  # v of concat

    def draw_weights(self) -> None:
        """N(0, 1/A) for the vector; the linear maps are initialized with all others."""
        if self.score_vector is not None:
            nn.init.normal_(self.score_vector, std=len(self.score_vector) ** -0.5)

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`keys` are `self.keys(memory)`; the `mask` (B, N) is True, or 0, for what is not padding."""
        query = self.query(state)
        if self.score_vector is None:
            scores = (keys @ query[:, :, None])[..., 0]
        else:
            scores = (query[:, None] + keys).tanh() @ self.score_vector
        weights = masked_softmax(scores, mask)
        return (weights[:, None] @ memory)[:, 0], weights
