"""The decoder of the Transformer, which reads any memory: encoded words, or the patches of an image.

All tokens at once in training, one new token per row in decoding, with the keys and values of those before it.
B rows, S sentences, M target tokens, N tokens of the memory, D width, L layers, H heads, K and V the widths of one
head's keys and values.
"""

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.models.base.text_contract import Memory
from vitrail.models.parts.attention import KeyValues
from vitrail.models.text.layers import DecoderLayer, LayerSizes
from vitrail.models.text.token_embedding import multiply_rows


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


def make_padding_mask(kept: Tensor | None) -> Tensor | None:
    """The mask of an attention whose keys are `kept`: (B, N) → (B, 1, 1, N)."""
    return None if kept is None else kept[:, None, None]


@dataclass
class DecoderState:
    """Keys and values of every layer: of the tokens so far, and of the S sentences of the memory, which never change.

    Row after row, B/S of the B rows read the same sentence: its beams.
    """

    layers: list[DecoderStep]
    cached: Tensor  # (L, B, H, n, K + V): keys and values next to each other, of which `length` tokens are set
    memory: list[tuple[Tensor, Tensor]]  # of every layer, (S, H, N, K) and (S, H, N, V)
    mask: Tensor | None  # added to the scores of the memory, (S, 1, 1, N); None: nothing is padding
    length: int = 0
    cache: list[KeyValues] = field(init=False)  # the keys and values of each layer

    def __post_init__(self) -> None:
        width = self.memory[0][0].shape[3]
        layers = (self.cached[layer] for layer in range(len(self.layers)))  # iterating gives views that are read only
        self.cache = [KeyValues(layer[..., :width], layer[..., width:], self.length) for layer in layers]

    def reorder(self, rows: Tensor) -> "DecoderState":
        """In place, where there are not more rows than before: most beams continue themselves, and stay."""
        order: list[int] = rows.tolist()
        sentences = len(self.memory[0][0])
        kept = list_sentences([row * sentences // self.cached.shape[1] for row in order])
        cached = self.take_cached(rows, find_moved(order, rows.device))
        if kept == list(range(sentences)):
            return self if cached is self.cached else replace(self, cached=cached)
        chosen, moved = torch.tensor(kept, device=rows.device), find_moved(kept, rows.device)
        memory = [(take_rows(k, chosen, moved), take_rows(v, chosen, moved)) for k, v in self.memory]
        mask = None if self.mask is None else self.mask.index_select(0, chosen)
        return replace(self, cached=cached, memory=memory, mask=mask)

    def take_cached(self, rows: Tensor, moved: Tensor) -> Tensor:
        """The keys and values of these rows; of more rows than before, with room for as many tokens."""
        layers, before, heads, length, width = self.cached.shape
        chosen = take_rows(self.cached.narrow(3, 0, self.length), rows, moved, dim=1)
        if len(rows) == before:
            return self.cached
        if len(rows) < before:
            return self.cached.narrow(1, 0, len(rows))
        larger = self.cached.new_empty((layers, len(rows), heads, length, width))
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
        like, sizes = memory.tokens, self.sizes
        shape = (len(self.layers), len(like), sizes.heads, length, sizes.key_width + sizes.value_width)
        mask = None
        if memory.kept is not None and not memory.kept.all():
            mask = torch.zeros_like(memory.kept, dtype=like.dtype).masked_fill(~memory.kept, -torch.inf)[:, None, None]
        layers = [DecoderStep(layer) for layer in self.layers]
        return DecoderState(layers, like.new_empty(shape), self.project_memory(memory), mask)

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
