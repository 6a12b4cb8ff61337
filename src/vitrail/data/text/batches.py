"""Batches of sentence pairs with about equal numbers of tokens. A batch depends only on the seed and the step.

B sentences, N source tokens, M target tokens. Tokens of a pair are counted with the end token of each sentence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.text import format_count
from vitrail.data.batch import Batch
from vitrail.data.rng import ORDER_PURPOSE, make_view_keys, uniform_randoms
from vitrail.data.text.pairs import SentencePairs
from vitrail.data.text.tokenizer import TextTokenizer

PLACE_JITTER = 1.0  # batches by which a pair can move in the sorted order, so that batches differ between epochs
Indices = NDArray[np.int64]


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


@dataclass(frozen=True, kw_only=True)
class EncodedPairs:
    """Sentence pairs as tokens, without those that are too long for the model."""

    sources: TokenRows
    targets: TokenRows
    indices: Indices  # of the pairs in the data they were made from
    pad: int
    start: int
    end: int
    notes: tuple[str, ...] = ()

    @classmethod
    def encode(cls, pairs: SentencePairs, tokenizer: TextTokenizer, *, length: int | None = None) -> "EncodedPairs":
        """Encode pairs; those with more than `length` tokens on one side, with the end token, are left out."""
        sources, targets = tokenizer.encode(pairs.sources), tokenizer.encode(pairs.targets)
        most = np.array([max(len(one), len(other)) + 1 for one, other in zip(sources, targets, strict=True)], np.int64)
        kept = np.flatnonzero(most <= length) if length is not None else np.arange(len(most))
        notes = list[str]()
        if dropped := len(most) - len(kept):
            notes.append(f"{pairs.name}: {format_count(dropped, 'pair')} longer than {length} tokens left out")
        if len(pairs) and not len(kept):
            raise DataError(
                f"{pairs.name}: all {len(pairs):,} pairs are longer than {length} tokens; expected a larger `length`"
            )
        return cls(
            sources=TokenRows.join([sources[each] for each in kept]),
            targets=TokenRows.join([targets[each] for each in kept]),
            indices=kept,
            pad=tokenizer.pad,
            start=tokenizer.start,
            end=tokenizer.end,
            notes=tuple(notes),
        )

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def token_counts(self) -> Indices:
        """Source and target tokens of each pair, with their end tokens."""
        return self.sources.lengths + self.targets.lengths + 2

    def make_batch(self, rows: Indices, share: float = 1.0) -> Batch:
        """`source` (B, N), `target_in` and `target_out` (B, M), `indices` (B,) in the data, and `share` ().

        The target that the model reads is one token behind the one it predicts.
        """
        tensors = {
            "source": self.sources.pad(rows, pad=self.pad, last=self.end),
            "target_in": self.targets.pad(rows, pad=self.pad, first=self.start),
            "target_out": self.targets.pad(rows, pad=self.pad, last=self.end),
            "indices": torch.from_numpy(self.indices[rows]),
            "share": torch.tensor(share, dtype=torch.float32),
        }
        return Batch(tensors, {}, len(rows))


@dataclass(frozen=True, kw_only=True)
class PairBatches:
    """The training batches of every epoch: each pair once, the same number of batches in all epochs.

    Pairs are sorted by length, moved a little at random, and cut into batches of equal weight, which are shuffled.
    The weight of a pair is its number of tokens, and at least batch_tokens / max_sentences.
    """

    pairs: EncodedPairs
    batch_tokens: int  # source and target tokens of a batch, about
    max_sentences: int  # in a batch
    seed: int = 0
    steps_per_epoch: int = field(init=False)
    weights: Indices = field(init=False)  # × max_sentences, to compute with integers
    plans: dict[int, list[Indices]] = field(init=False, repr=False, default_factory=dict[int, list[Indices]])

    def __post_init__(self) -> None:
        counts = self.pairs.token_counts
        if not len(counts):
            raise DataError("there are no training pairs; expected at least one")
        if self.max_sentences < 1:
            raise ConfigError(f"`batch` is {self.max_sentences}; expected at least 1 sentence")
        if self.batch_tokens < counts.max():
            raise ConfigError(
                f"`batch_tokens` is {self.batch_tokens}; expected at least {counts.max()}, as the longest pair has"
            )
        weights = np.maximum(counts * self.max_sentences, self.batch_tokens)
        steps = ceil(int(weights.sum()) / (self.batch_tokens * self.max_sentences))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "steps_per_epoch", steps)

    def rows_at(self, step: int) -> Indices:
        """The pairs of a step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return self.plan_epoch(epoch)[number]

    def plan_epoch(self, epoch: int) -> list[Indices]:
        """The pairs of every batch of an epoch; the last two epochs are remembered."""
        if epoch not in self.plans:
            while len(self.plans) > 1:
                self.plans.pop(min(self.plans))
            self.plans[epoch] = self.make_plan(epoch)
        return self.plans[epoch]

    def make_plan(self, epoch: int) -> list[Indices]:
        """Sort by target length, then by source length, up and down in turn, so that little of a batch is padding."""
        count, targets = len(self.pairs), self.pairs.targets.lengths
        keys = make_view_keys(self.seed, epoch, np.arange(count), 0)
        randoms = uniform_randoms(keys, 2, purpose=ORDER_PURPOSE)
        sources = self.pairs.sources.lengths + randoms[:, 0]  # pairs of the same lengths are shuffled
        order = np.lexsort((np.where(targets % 2, sources, -sources), targets))
        moves = PLACE_JITTER * count / self.steps_per_epoch * (2 * randoms[:, 1] - 1)
        order = order[np.argsort(np.arange(count) + moves, kind="stable")]
        batches = np.split(order, cut_equally(self.weights[order], self.steps_per_epoch)[1:])
        keys = make_view_keys(self.seed, epoch, np.arange(len(batches)), 1)
        shuffled = np.argsort(uniform_randoms(keys, 1, purpose=ORDER_PURPOSE)[:, 0], kind="stable")
        return [batches[each] for each in shuffled]

    def load(self, steps: range, *, accumulate: int = 1, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """This rank's part of the batch of every step, as `accumulate` micro-batches per step.

        A part has every n-th sentence, so that the parts have about the same lengths. Its `share` is its number of
        target tokens relative to the mean of all parts: the mean of share × (mean loss of a part's tokens) over all
        parts is the mean loss of the step's tokens. If there are more parts than sentences, the parts without any take
        one of the others, with a share of 0.
        """
        parts = accumulate * world
        for step in steps:
            rows = self.rows_at(step)
            tokens = int((self.pairs.targets.lengths[rows] + 1).sum())
            for part in range(rank * accumulate, (rank + 1) * accumulate):
                own = rows[part::parts]
                own_tokens = int((self.pairs.targets.lengths[own] + 1).sum())
                yield self.pairs.make_batch(own if len(own) else rows[:1], own_tokens * parts / tokens)


def cut_equally(weights: Indices, parts: int) -> Indices:
    """Where each of `parts` consecutive parts of equal weight starts; none is empty: (parts,).

    An element belongs to the part in which its last unit of weight lies.
    """
    ends = np.cumsum(weights)
    limits = np.arange(parts) * int(ends[-1]) // parts
    starts = np.searchsorted(ends, limits, side="right")
    numbers = np.arange(parts)
    starts = np.maximum.accumulate(starts - numbers) + numbers  # an element heavier than a part could leave one empty
    return np.minimum(starts, len(weights) - parts + numbers)


def load_validation_batches(
    pairs: EncodedPairs, *, batch: int, rank: int = 0, world: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """Every pair once over all ranks, or the first `limit`, in a fixed order: sorted by length."""
    rows = np.arange(len(pairs) if limit is None else min(limit, len(pairs)))
    rows = rows[np.argsort(pairs.token_counts[rows], kind="stable")][rank::world]
    for start in range(0, len(rows), batch):
        yield pairs.make_batch(rows[start : start + batch])
