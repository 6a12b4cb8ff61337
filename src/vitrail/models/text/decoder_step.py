"""A layer of the decoder for one new token of each row.

B rows, S sentences, D width, H heads, K and V the widths of one head's keys and values.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.parts.row_product import multiply_rows
from vitrail.models.text.key_values import KeyValues


class DecoderStep:
    """The same as a DecoderLayer without dropout: (B, D) → (B, D).

    It has the weights as plain tensors: with one row, calling modules would take a sixth of the time.
    """

    def __init__(self, layer: Any) -> None:
        self.pre_norm: bool = layer.pre_norm
        attn, cross, mlp = layer.attn, layer.cross, layer.mlp
        self.heads: int = attn.heads
        self.parts: list[int] = attn.parts
        self.attend, self.read_memory, self.act = attn.attend, cross.attend, mlp.act
        self.qkv, self.proj = get_weights(attn.qkv), get_weights(attn.proj)
        self.cross_q, self.cross_proj = get_weights(cross.q), get_weights(cross.proj)
        self.fc1, self.fc2 = get_weights(mlp.fc1), get_weights(mlp.fc2)
        self.norm1, self.norm2, self.norm3 = (get_norm(norm) for norm in (layer.norm1, layer.norm2, layer.norm3))

    def run(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValues) -> Tensor:
        if self.pre_norm:
            x = x + self.attend_before(torch.layer_norm(x, *self.norm1), cache)
            x = x + self.attend_memory(torch.layer_norm(x, *self.norm2), memory, mask)
            return x + self.run_mlp(torch.layer_norm(x, *self.norm3))
        x = torch.layer_norm(x + self.attend_before(x, cache), *self.norm1)
        x = torch.layer_norm(x + self.attend_memory(x, memory, mask), *self.norm2)
        return torch.layer_norm(x + self.run_mlp(x), *self.norm3)

    def attend_before(self, x: Tensor, cache: KeyValues) -> Tensor:
        """The token attends to those in the cache and to itself."""
        shape = (x.size(0), self.heads, 1, -1)
        q, k, v = multiply_rows(x, *self.qkv).split_with_sizes(self.parts, dim=1)
        keys, values = cache.extend(k.view(shape), v.view(shape))
        return multiply_rows(self.attend(q.view(shape), keys, values, None).flatten(1), *self.proj)

    def attend_memory(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """The B/S beams of a sentence are the queries of its memory."""
        k, v = memory
        q = multiply_rows(x, *self.cross_q).view(k.size(0), -1, self.heads, k.size(3)).transpose(1, 2)  # (S, H, B/S, K)
        heads = self.read_memory(q, k, v, mask).transpose(1, 2)
        return multiply_rows(heads.reshape(x.size(0), -1), *self.cross_proj)

    def run_mlp(self, x: Tensor) -> Tensor:
        return multiply_rows(self.act(multiply_rows(x, *self.fc1)), *self.fc2)


def get_weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def get_norm(norm: nn.LayerNorm) -> tuple[tuple[int, ...], Tensor, Tensor, float]:
    """The arguments of torch.layer_norm after x."""
    return norm.normalized_shape, norm.weight, norm.bias, norm.eps
