"""A text model without a cache: every step decodes the whole text so far, as in training."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.models.base.text_contract import Memory, TextModel


@dataclass(frozen=True)
class TextSoFar:
    """The state of a model without a cache: all tokens, and the memory."""

    tokens: Tensor  # (B, tokens so far)
    memory: Memory

    def reorder(self, rows: Tensor) -> "TextSoFar":
        memory, kept = self.memory, self.memory.kept
        chosen = Memory(
            memory.tokens[rows], None if kept is None else kept[rows], tuple(each[:, rows] for each in memory.final)
        )
        return TextSoFar(self.tokens[rows], chosen)


class UncachedTextModel(TextModel):
    """Another model, of which only `encode` and `decode` are used."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        self.model = model

    def encode(self, source: Tensor) -> Memory:
        return self.model.encode(source)

    def start(self, memory: Memory, length: int) -> TextSoFar:  # noqa: ARG002
        return TextSoFar(torch.empty(len(memory.tokens), 0, dtype=torch.int64), memory)

    def step(self, tokens: Tensor, state: TextSoFar) -> tuple[Tensor, TextSoFar]:
        state = replace(state, tokens=torch.cat([state.tokens, tokens[:, None]], dim=1))
        return self.model.decode(state.memory, state.tokens)[:, -1], state
