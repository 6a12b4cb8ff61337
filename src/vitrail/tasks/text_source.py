"""Sentence pairs for training and validation, as batches of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vitrail.base.text import format_count
from vitrail.checkpoint.weight_folders import compute_tokenizer_checksum
from vitrail.data.batch import Batch
from vitrail.data.text.batches import EncodedPairs, PairBatches, load_validation_batches
from vitrail.data.text.pairs import PairSplits
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Batches of sentence pairs, each a function of the seed and the step."""

    data: PairSplits
    tokenizer: TextTokenizer
    train: EncodedPairs
    val: EncodedPairs
    batches: PairBatches

    @classmethod
    def encode(
        cls,
        data: PairSplits,
        tokenizer: TextTokenizer,
        *,
        batch: int,
        batch_tokens: int,
        max_length: int,
        limit: int | None = None,
        seed: int = 0,
    ) -> "TextSource":
        """Encode all pairs but those longer than `limit`, the positions of a model, and in training `max_length`."""
        longest = max_length if limit is None else min(max_length, limit)
        train = EncodedPairs.encode(data.train, tokenizer, length=longest)
        batches = PairBatches(pairs=train, batch_tokens=batch_tokens, max_sentences=batch, seed=seed)
        val = EncodedPairs.encode(data.val, tokenizer, length=limit)
        return cls(data=data, tokenizer=tokenizer, train=train, val=val, batches=batches)

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.data.notes, *self.train.notes, *self.val.notes)

    @property
    def example_count(self) -> int:
        return len(self.train)

    @property
    def validation_count(self) -> int:
        return len(self.val)

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    @property
    def in_memory(self) -> bool:
        return True

    def load_batches(
        self, steps: range, *, accumulate: int = 1, workers: int = 0, ranks: Ranks | None = None, pin: bool = False
    ) -> Iterator[Batch]:
        """A batch takes less than a millisecond to make, so no workers are needed."""
        del workers
        ranks = ranks or Ranks()
        found = self.batches.load(steps, accumulate=accumulate, rank=ranks.rank, world=ranks.world_size)
        return (batch.pin_memory() for batch in found) if pin else found

    def load_validation_batches(
        self, *, batch: int, workers: int = 0, ranks: Ranks | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Every validation pair once, or the first `limit`."""
        del workers
        ranks = ranks or Ranks()
        return load_validation_batches(self.val, batch=batch, rank=ranks.rank, world=ranks.world_size, limit=limit)

    def describe(self) -> str:
        return (
            f"{self.name} {'-'.join(self.data.languages)}: {format_count(self.example_count, 'training pair')}, "
            f"{format_count(self.validation_count, 'validation pair')}, "
            f"{format_count(self.tokenizer.vocabulary, 'token')} in the vocabulary"
        )

    @cached_property
    def tokenizer_text(self) -> str:
        return self.tokenizer.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.data.name,
            "languages": list(self.data.languages),
            "train": self.example_count,
            "val": self.validation_count,
            "tokenizer": compute_tokenizer_checksum(self.tokenizer_text),
        }

    def describe_model_input(self, model: Any) -> dict[str, Any]:
        del model
        return {"languages": self.data.languages, "tokenizer": self.tokenizer_text}
