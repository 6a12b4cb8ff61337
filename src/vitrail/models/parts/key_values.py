"""Keys and values of the tokens so far, kept so that each new token costs one token.

B batch, H heads, n tokens, K and V the widths of one head's keys and values.
"""

from dataclasses import dataclass

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
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length], self.values[:, :, start : self.length] = k, v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def select(self, rows: Tensor) -> "KeyValues":
        """Those of these rows, in this order; in place if their number stays the same."""
        same = len(rows) == len(self.keys)
        chosen = KeyValues(
            self.keys if same else self.keys.new_empty((len(rows), *self.keys.shape[1:])),
            self.values if same else self.values.new_empty((len(rows), *self.values.shape[1:])),
        )
        chosen.extend(*(each[:, :, : self.length].index_select(0, rows) for each in (self.keys, self.values)))
        return chosen
