"""Captions as tokens: an example is one caption with its image. Batches are those of images, with the words added.

B examples, M target tokens. Tokens of a caption are counted with its end token.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.base.errors import DataError
from vitrail.base.text import format_count
from vitrail.data.batch import Batch
from vitrail.data.captions.captions import CaptionedImages
from vitrail.data.text.batches import TokenRows
from vitrail.data.text.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class EncodedCaptions:
    """Captions as tokens, without those that are too long for the model, and the image of each."""

    rows: TokenRows
    owners: NDArray[np.int64]  # the image of each caption
    pad: int
    start: int
    end: int
    notes: tuple[str, ...] = ()

    @classmethod
    def encode(cls, data: CaptionedImages, tokenizer: TextTokenizer, *, length: int | None = None) -> "EncodedCaptions":
        """Encode all captions; those with more than `length` tokens, with the end token, are left out."""
        every = tokenizer.encode([caption for captions in data.captions for caption in captions])
        owners = np.repeat(np.arange(len(data)), [len(captions) for captions in data.captions])
        lengths = np.fromiter(map(len, every), np.int64, len(every)) + 1
        kept = np.flatnonzero(lengths <= length) if length is not None else np.arange(len(every))
        if len(every) and not len(kept):
            raise DataError(
                f"{data.name}: all {len(every):,} captions are longer than {length} tokens; expected a larger "
                "`max_length`"
            )
        dropped = len(every) - len(kept)
        return cls(
            rows=TokenRows.join([every[each] for each in kept]),
            owners=owners[kept],
            pad=tokenizer.pad,
            start=tokenizer.start,
            end=tokenizer.end,
            notes=(f"{data.name}: {format_count(dropped, 'caption')} longer than {length} tokens left out",)
            if dropped
            else (),
        )

    def __len__(self) -> int:
        return len(self.owners)

    def count_tokens(self, examples: NDArray[np.int64]) -> int:
        return int((self.rows.lengths[examples] + 1).sum())

    def add_words(self, batch: Batch, tokens_per_part: float | None = None) -> Batch:
        """The batch with `target_in` and `target_out` (B, M), and its `share` ().

        The caption that the model reads is one token behind the one it predicts. The share is the number of tokens of
        this batch relative to the mean of all parts of a step, so that the mean of share × (mean loss of a part's
        tokens) is the mean loss of all tokens; 1 if that is not known.
        """
        examples = batch["indices"].numpy()
        share = 1.0 if tokens_per_part is None else self.count_tokens(examples) / tokens_per_part
        words = {
            "target_in": self.rows.pad(examples, pad=self.pad, first=self.start),
            "target_out": self.rows.pad(examples, pad=self.pad, last=self.end),
            "share": torch.tensor(share, dtype=torch.float32),
        }
        return replace(batch, tensors={**batch.tensors, **words})
