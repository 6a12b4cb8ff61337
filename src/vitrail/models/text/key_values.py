"""Keys and values of the tokens so far, kept so that each new token costs one token.

B batch, H heads, n tokens, K and V the widths of one head's keys and values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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


def take_rows(tensor: Tensor, rows: Tensor, moved: Tensor, dim: int = 0) -> Tensor:
    """These rows of a tensor in this order, in place if they are not more: only those that `moved` are copied."""
    number = rows.size(0)
    if number > tensor.size(dim):
        return tensor.index_select(dim, rows)
    if moved.size(0):
        tensor.index_copy_(dim, moved, tensor.index_select(dim, rows[moved]))
    return tensor.narrow(dim, 0, number)


def find_moved(rows: list[int], device: torch.device) -> Tensor:
    """The places whose row changes."""
    return torch.tensor([place for place, row in enumerate(rows) if row != place], dtype=torch.int64, device=device)
