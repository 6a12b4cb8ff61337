"""The projection to queries, keys and values of models whose keys have no bias. D width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeylessBiasLinear(nn.Linear):
    """q, k and v in one matrix, with a bias of q and v only: (…, D) → (…, 3·D)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, bias=False)
        self.qv_bias = nn.Parameter(torch.empty(2 * width))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        q_bias, v_bias = self.qv_bias.chunk(2)
        return F.linear(input, self.weight, torch.cat([q_bias, torch.zeros_like(q_bias), v_bias]))
