"""The decoder of the Transformer, which reads any memory: encoded words, or the patches of an image.

B rows, M target tokens, N tokens of the memory, D width, L layers.
"""

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.parts.decoder_step import DecoderStep
from vitrail.models.parts.key_values import KeyValues, find_moved, take_rows
from vitrail.models.parts.text_layers import DecoderLayer, LayerSizes
from vitrail.models.text_contract import Memory


def make_padding_mask(kept: Tensor | None) -> Tensor | None:
    """The mask of an attention whose keys are `kept`: (B, N) → (B, 1, 1, N)."""
    return None if kept is None else kept[:, None, None]


@dataclass
class DecoderState:
    """Keys and values of every layer: of the tokens so far, and of the S sentences of the memory, which never change.

    Row after row, B/S of the B rows read the same sentence: its beams.
    """

    layers: list[DecoderStep]
    keys: Tensor  # (L, B, H, n, K), of which `length` tokens are set
    values: Tensor  # (L, B, H, n, V)
    memory: list[tuple[Tensor, Tensor]]  # of every layer, (S, H, N, K) and (S, H, N, V)
    mask: Tensor | None  # added to the scores of the memory, (S, 1, 1, N); None: nothing is padding
    length: int = 0
    cache: list[KeyValues] = field(init=False)  # the keys and values of each layer

    def __post_init__(self) -> None:
        numbers = range(len(self.keys))  # iterating over a tensor gives views that cannot be written in training
        self.cache = [KeyValues(self.keys[i], self.values[i], self.length) for i in numbers]

    def reorder(self, rows: Tensor) -> "DecoderState":
        """In place, where there are not more rows than before: most beams continue themselves, and stay."""
        order: list[int] = rows.tolist()
        moved, beams = find_moved(order, rows.device), self.keys.shape[1] // self.sentences
        keys, values = (self.take_cached(each, rows, moved) for each in (self.keys, self.values))
        kept = list_sentences([row // beams for row in order])
        if kept == list(range(self.sentences)):
            return DecoderState(self.layers, keys, values, self.memory, self.mask, self.length)
        sentences, moved = torch.tensor(kept, device=rows.device), find_moved(kept, rows.device)
        memory = [(take_rows(k, sentences, moved), take_rows(v, sentences, moved)) for k, v in self.memory]
        mask = None if self.mask is None else self.mask.index_select(0, sentences)
        return DecoderState(self.layers, keys, values, memory, mask, self.length)

    @property
    def sentences(self) -> int:
        return len(self.memory[0][0])

    def take_cached(self, tensor: Tensor, rows: Tensor, moved: Tensor) -> Tensor:
        """These rows of keys or values; of more rows than before, with room for as many tokens."""
        layers, before, heads, length, width = tensor.shape
        chosen = take_rows(tensor.narrow(3, 0, self.length), rows, moved, dim=1)
        if len(rows) <= before:
            return tensor.narrow(1, 0, len(rows))
        larger = tensor.new_empty((layers, len(rows), heads, length, width))
        larger.narrow(3, 0, self.length).copy_(chosen)
        return larger


def list_sentences(owners: list[int]) -> list[int]:
    """The sentences that rows read, each once if all have as many rows one after another, else once for every row."""
    groups = [(owner, len(list(rows))) for owner, rows in groupby(owners)]
    equal = all(size == groups[0][1] for _, size in groups)
    return [owner for owner, _ in groups] if equal else owners


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
        shape = (len(self.layers), rows, sizes.heads, length)
        mask = None
        if memory.kept is not None and not memory.kept.all():
            mask = torch.zeros_like(memory.kept, dtype=like.dtype).masked_fill(~memory.kept, -torch.inf)[:, None, None]
        keys, values = (like.new_empty((*shape, width)) for width in (sizes.key_width, sizes.value_width))
        layers = [DecoderStep(layer) for layer in self.layers]
        return DecoderState(layers, keys, values, self.project_memory(memory), mask)

    def step(self, x: Tensor, state: DecoderState) -> Tensor:
        """One more token of each row, whose keys and values are added to the state: (B, D) → (B, D)."""
        for layer, read, cache in zip(state.layers, state.memory, state.cache, strict=True):
            x = layer.run(x, read, state.mask, cache)
        state.length += 1
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
