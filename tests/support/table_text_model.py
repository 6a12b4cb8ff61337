"""A text model whose logits are a table: random numbers that depend on the whole text so far, and on the row."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.predict.search.hypothesis import Hypothesis

PAD, START, END = range(3)
WORDS = (3, 4, 5, 6)


@dataclass
class PrefixState:
    """The state of a table: the text so far."""

    rows: list[int]
    prefixes: list[tuple[int, ...]]
    reorders: list[list[int]] = field(default_factory=list[list[int]])

    def reorder(self, rows: Tensor) -> "PrefixState":
        order: list[int] = rows.tolist()
        self.reorders.append(order)
        return replace(self, rows=[self.rows[i] for i in order], prefixes=[self.prefixes[i] for i in order])


class TableTextModel(TextModel):
    """Logits N(0, spread²), with ties if they are rounded to `decimals`. `stepped` are the rows of each step."""

    def __init__(
        self, vocabulary: int = 3 + len(WORDS), seed: int = 0, spread: float = 1.5, decimals: int | None = None
    ) -> None:
        super().__init__(SimpleNamespace(pad=PAD, vocabulary=vocabulary))
        self.vocabulary, self.seed, self.spread, self.decimals = vocabulary, seed, spread, decimals
        self.stepped: list[int] = []
        self.last_state: PrefixState | None = None

    def encode(self, source: Tensor) -> Memory:
        return Memory(tokens=source[:, :, None].float())

    def start(self, memory: Memory, length: int) -> PrefixState:  # noqa: ARG002
        self.stepped = []
        return PrefixState([int(row) for row in memory.tokens[:, 0, 0]], [()] * len(memory.tokens))

    def step(self, tokens: Tensor, state: PrefixState) -> tuple[Tensor, PrefixState]:
        self.stepped.append(len(tokens))
        state.prefixes = [(*prefix, int(token)) for prefix, token in zip(state.prefixes, tokens, strict=True)]
        self.last_state = state
        return torch.stack([self.make_logits(*each) for each in zip(state.rows, state.prefixes, strict=True)]), state

    def make_logits(self, row: int, prefix: tuple[int, ...]) -> Tensor:
        """The logits after a text that begins with the start token: (V,)."""
        digest = hashlib.sha256(repr((self.seed, row, prefix)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        logits = self.spread * torch.randn(self.vocabulary, generator=generator)
        return logits if self.decimals is None else logits.round(decimals=self.decimals)


def make_memory(model: TextModel, rows: list[int]) -> Memory:
    """A memory whose rows have these numbers."""
    return model.encode(torch.tensor(rows)[:, None])


def extend(model: TableTextModel, row: int, text: tuple[int, ...]) -> list[tuple[int, float]]:
    """The log-probability of every token that can follow a text."""
    shares = model.make_logits(row, (START, *text)).log_softmax(0).tolist()
    return [(token, shares[token]) for token in (*WORDS, END)]


def score_text(model: TableTextModel, row: int, text: tuple[int, ...]) -> float:
    """The log-probability of tokens, the end among them."""
    prefixes = ((START, *text[:i]) for i in range(len(text)))
    shares = (model.make_logits(row, prefix).log_softmax(0) for prefix in prefixes)
    return math.fsum(float(share[token]) for share, token in zip(shares, text, strict=True))


def list_texts(limit: int, text: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All texts that end, or that have as many tokens as the limit."""
    yield (*text, END)
    for token in WORDS:
        if len(text) + 1 == limit:
            yield (*text, token)
        else:
            yield from list_texts(limit, (*text, token))


def read_text(hypothesis: Hypothesis) -> tuple[int, ...]:
    return (*hypothesis.tokens, END) if hypothesis.finished else hypothesis.tokens
