"""From token ids to vectors and back: the embedding, the positions in the sentence, and the output layer.

B batch, N tokens, D width, V vocabulary.
"""

from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.positions import sinusoid

CPU = torch.device("cpu")


def check_tokens(tokens: Tensor, what: str, limit: int | None = None) -> None:
    """Raise an error for anything but rows of at least one token, or for rows longer than the model's positions."""
    if tokens.ndim != 2 or tokens.shape[1] == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ConfigError(
            f"the {what} is a tensor of {tokens.dtype} and shape {tuple(tokens.shape)}; expected token ids, one of "
            "torch.int64 and shape (sentences, tokens)"
        )
    if limit is not None and tokens.shape[1] > limit:
        raise ConfigError(
            f"the {what} has {tokens.shape[1]} tokens; expected at most {limit}, the positions of the model: shorten "
            "or split the sentence, or build the model with a larger `length`"
        )


def check_vocabulary(config: Any) -> None:
    """Raise an error for a padding token outside a vocabulary, or one table for two vocabularies."""
    source = config.source_vocabulary or config.vocabulary
    if config.pad >= min(source, config.vocabulary):
        raise ConfigError(
            f"pad is {config.pad}; expected a token of the vocabulary, less than {min(source, config.vocabulary)}"
        )
    if config.share == "all" and source != config.vocabulary:
        raise ConfigError(
            f"share 'all' with {source} source and {config.vocabulary} target tokens; expected the same vocabulary, or "
            "share='target'"
        )


class TokenEmbedding(nn.Module):
    """A row of a table for each token, times `scale`: (B, N) → (B, N, D)."""

    def __init__(self, vocabulary: int, width: int, pad: int, scale: float = 1.0) -> None:
        super().__init__()
        self.pad, self.scale = pad, scale
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def draw_weights(self) -> None:
        """N(0, 1/D): times √D, the tokens have the size of their positions; the row of the padding is zero."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        self.weight[self.pad] = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight, padding_idx=self.pad)  # padding gets no gradient
        return x if self.scale == 1.0 else x * self.scale


class SequencePositions(nn.Module):
    """Adds to each token the vector of its position, fixed sinusoids or learned: (B, N, D) → (B, N, D)."""

    def __init__(self, kind: Literal["sinusoid", "learned"], length: int, width: int) -> None:
        super().__init__()
        self.shape = (length, width)
        self.weight = nn.Parameter(torch.empty(length, width)) if kind == "learned" else None

    def draw_weights(self) -> None:
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """The first token has the position `start`."""
        return x + self.make_table(x.device, x.dtype)[start : start + x.shape[1]]

    def add_one(self, x: Tensor, position: int) -> Tensor:
        """To one token of each row, which all have the same position: (B, D) → (B, D)."""
        return x + self.make_table(x.device, x.dtype)[position]

    def make_table(self, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors of all positions; learned ones as they are: (length, D)."""
        return make_sinusoid_table(*self.shape, device, dtype) if self.weight is None else self.weight


@lru_cache(maxsize=16)
def make_sinusoid_table(length: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The sinusoids of all positions; kept, as every step adds a row, but not in the weights: (length, D)."""
    with torch.inference_mode(False):  # a table that is first used in prediction may be used in training later
        return sinusoid(torch.arange(length, device=device), width).to(dtype)


class OutputLayer(nn.Module):
    """Logits of all tokens of the vocabulary, by its own table or the one of an embedding: (…, D) → (…, V)."""

    def __init__(self, vocabulary: int, width: int, *, own_table: bool, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width)) if own_table else None
        self.bias = nn.Parameter(torch.empty(vocabulary)) if bias else None

    def draw_weights(self) -> None:
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, embedding: TokenEmbedding) -> Tensor:
        return multiply_rows(x, embedding.weight if self.weight is None else self.weight, self.bias)


MAX_ROWS = 8  # more rows are as fast in the usual order


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, (…, D) → (…, E). On a CPU the product of few rows, (B, D), is computed as weight · xᵀ.

    Reading the weights is most of its time, and BLAS reads them up to twice as fast in this order, but not for one row.
    """
    few = x.dim() == 2 and 1 < x.size(0) <= MAX_ROWS and x.is_cpu
    if not few or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t()  # (B, E), in the order of (E, B)
    if bias is None:
        return product.contiguous()
    return torch.add(product, bias, out=x.new_empty(product.shape))
