"""Encoded sentences of different lengths, kept in one array, and padded when a batch is made of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class TokenRows:
    """Rows of token ids, one after the other in `tokens`."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]  # (rows + 1,): row i is tokens[starts[i] : starts[i + 1]]

    @classmethod
    def join(cls, rows: Sequence[Sequence[int]]) -> "TokenRows":
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.fromiter((token for row in rows for token in row), np.int32, int(lengths.sum()))
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def pad(self, rows: NDArray[np.int64], *, pad: int, first: int | None = None, last: int | None = None) -> Tensor:
        """These rows, with a token before and after each, padded at the end: int64 (rows, longest)."""
        lengths, before = self.lengths[rows], int(first is not None)
        columns = np.arange(int(lengths.max(initial=0)))
        padded = np.full((len(rows), before + len(columns) + int(last is not None)), pad, np.int64)
        is_token = columns < lengths[:, None]
        places = (self.starts[rows][:, None] + columns)[is_token]
        padded[:, before : before + len(columns)][is_token] = self.tokens[places]
        if first is not None:
            padded[:, 0] = first
        if last is not None:
            padded[np.arange(len(rows)), before + lengths] = last
        return torch.from_numpy(padded)
