"""Score the attention of a model that reverses digits, whose right attention is known: from end to beginning."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.inspection.sentences.sentence_attention import compute_maps, make_rows, resolve_index
from vitrail.inspection.sentences.sentence_words import SentenceWords
from vitrail.text_loading import LoadedTextModel


@dataclass(frozen=True)
class ReversalScore:
    """How many digits were written while the attention was largest at the same digit of the source."""

    hits: int
    tokens: int

    @property
    def share(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return f"attention is largest on the anti-diagonal for {self.hits} of {self.tokens:,} tokens, {self.share:.1%}"


@torch.inference_mode()
def score_reversal(
    loaded: LoadedTextModel, pairs: Iterable[tuple[str, str]], layer: int = -1, head: int | Literal["mean"] = "mean"
) -> ReversalScore:
    """Score the cross-attention of pairs of `data/text/pairs.py`, while the right digits are written."""
    model, tokenizer = loaded.model, loaded.tokenizer
    if model.no_maps_reason:
        raise ConfigError(f"there is no attention to score: {model.no_maps_reason}")
    hits = tokens = 0
    for digits, reverse in pairs:
        source, target = (SentenceWords.from_text(tokenizer, each) for each in (digits, reverse))
        row = make_rows(model, [[*source.ids, tokenizer.end]])
        maps = compute_maps(model, model.encode(row), make_rows(model, [[tokenizer.start, *target.ids]]), row)["cross"]
        assert maps is not None
        of_layer = maps[resolve_index("layer", layer, len(maps))]
        chosen = of_layer.mean(0) if head == "mean" else of_layer[resolve_index("head", head, len(of_layer))]
        words = target.average_pieces(source.sum_pieces(chosen[:-1, :-1]))  # without the end on both sides
        hits += count_anti_diagonal(words)
        tokens += len(words)
    return ReversalScore(hits, tokens)


def count_anti_diagonal(maps: NDArray[Any]) -> int:
    """The rows of a square map whose largest value is on the anti-diagonal."""
    return int((maps.argmax(1) == np.arange(maps.shape[1])[::-1]).sum())
