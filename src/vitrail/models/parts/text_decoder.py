"""The decoder of the Transformer, which reads any memory: encoded words, or the patches of an image.

B rows, M target tokens, N tokens of the memory, D width, L layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.parts.key_values import KeyValues
from vitrail.models.parts.text_layers import DecoderLayer, LayerSizes
from vitrail.models.text_contract import Memory


def make_padding_mask(kept: Tensor | None) -> Tensor | None:
    """The mask of an attention whose keys are `kept`: (B, N) → (B, 1, 1, N)."""
    return None if kept is None else kept[:, None, None]


@dataclass
class DecoderState:
    """Keys and values of every layer: of the tokens so far, and of the memory, which never change."""

    cache: list[KeyValues]
    memory: list[tuple[Tensor, Tensor]]
    mask: Tensor | None  # added to the scores of the memory, (B, 1, 1, N); None: nothing is padding
    sentences: Tensor  # (B,): which row of the memory each row reads

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self.cache[0].length

    def reorder(self, rows: Tensor) -> "DecoderState":
        cache = [each.select(rows) for each in self.cache]
        sentences = self.sentences.index_select(0, rows)
        if torch.equal(sentences, self.sentences):  # beams of the same sentences: they read the same memory
            return DecoderState(cache, self.memory, self.mask, self.sentences)
        memory = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.memory]
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        return DecoderState(cache, memory, mask, sentences)


class TextDecoder(nn.Module):
    """Decoder layers, and after pre-norm layers a norm: (B, M, D) → (B, M, D)."""

    def __init__(self, depth: int, sizes: LayerSizes, memory_width: int) -> None:
        super().__init__()
        self.sizes, self.memory_width = sizes, memory_width
        self.layers = nn.ModuleList(DecoderLayer(sizes, memory_width) for _ in range(depth))
        self.norm = sizes.make_final_norm()

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """All tokens at once, each of which attends to those before it, as in training."""
        keys_values, mask = self.project_memory(memory), make_padding_mask(memory.kept)
        for layer, read in zip(self.layers, keys_values, strict=True):
            x = layer(x, read, mask)
        return self.norm(x)

    def start(self, memory: Memory, length: int) -> DecoderState:
        """The state before the first token, with room for `length` tokens."""
        rows, like, sizes = len(memory.tokens), memory.tokens, self.sizes
        shape = (rows, sizes.heads, length)
        cache = [KeyValues.allocate(shape, sizes.key_width, sizes.value_width, like) for _ in self.layers]
        mask = None
        if memory.kept is not None and not memory.kept.all():
            mask = torch.zeros_like(memory.kept, dtype=like.dtype).masked_fill(~memory.kept, -torch.inf)[:, None, None]
        return DecoderState(cache, self.project_memory(memory), mask, torch.arange(rows, device=like.device))

    def step(self, x: Tensor, state: DecoderState) -> Tensor:
        """One more token of each row, whose keys and values are added to the state: (B, 1, D) → (B, 1, D)."""
        for layer, read, cache in zip(self.layers, state.memory, state.cache, strict=True):
            x = layer(x, read, state.mask, cache)
        return self.norm(x)

    def project_memory(self, memory: Memory) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the memory for every layer."""
        width = memory.tokens.shape[-1]
        if width != self.memory_width:
            raise ConfigError(
                f"the memory has tokens of width {width}; expected {self.memory_width}: build the decoder with "
                f"memory_width={width}"
            )
        return [layer.cross.project_memory(memory.tokens) for layer in self.layers]  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
