"""Models whose keys have no bias: their projection to queries, keys and values, and its bias in files. D width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base.name_entries import TensorTransform


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
