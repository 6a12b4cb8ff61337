"""Check attention by occlusion: leave out each word of a sentence, and measure what changes in its translation.

An attention map shows where a model reads, which is not always what its output depends on.
W source words, M target words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.text import format_count
from vitrail.inspection.attention.attention_distance import correlate_ranks
from vitrail.inspection.sentences.sentence_attention import SentenceAttention, make_rows
from vitrail.models.base.text_contract import TextModel
from vitrail.opening import Opened
from vitrail.predict.search.settings import GREEDY

ROWS_AT_ONCE = 16  # sentences of which the logits of all tokens are in memory


@dataclass(frozen=True, kw_only=True, eq=False)  # comparing arrays is ambiguous
class WordOcclusion:
    """What each source word contributes: measured without it, not read from the attention."""

    losses: NDArray[np.float64]  # (M, W): how much the log-probability of a target word falls without a source word
    log_probabilities: NDArray[np.float64]  # (M,): of each target word, with all source words
    greedy: str  # the greedy translation of the complete sentence
    without: tuple[str, ...]  # the greedy translation without each source word

    @property
    def changed(self) -> tuple[bool, ...]:
        """Whether the greedy translation is another one without each source word."""
        return tuple(each != self.greedy for each in self.without)

    @property
    def totals(self) -> NDArray[np.float64]:
        """How much the log-probability of the translation falls without each source word: (W,)."""
        return self.losses.sum(0)

    def __str__(self) -> str:
        words = format_count(len(self.without), "word")
        if len(self.without) == 1:
            return f"without its only word the greedy translation {'changes' if self.changed[0] else 'is the same'}"
        return f"the greedy translation changes without {sum(self.changed)} of {words}"


@dataclass(frozen=True)
class AttentionAgreement:
    """How well attention agrees with occlusion: whether its largest weight is the most important word."""

    hits: int
    words: int  # target words
    correlation: float | None  # Spearman's, the mean over target words; None if there is none

    def __str__(self) -> str:
        if not self.words:
            return "there is no target word to compare attention with occlusion for"
        ranks = "" if self.correlation is None else f" (rank correlation {self.correlation:.2f})"
        words = format_count(self.words, "target word")
        return f"attention names the most important word for {self.hits} of {words}{ranks}"


@torch.inference_mode()
def occlude_words(loaded: Opened, read: SentenceAttention) -> WordOcclusion:
    """Translate the sentence again without each of its words, whose pieces are removed from the source."""
    model, tokenizer, source = loaded.model, loaded.tokenizer, read.source
    rows = [list(source.ids), *(source.drop_word(word) for word in range(len(read.source_words)))]
    tokens, texts = list[NDArray[np.float64]](), list[str]()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        tokens.append(compute_token_log_probabilities(model, some, read))
        found = GREEDY.run(model, tokenizer, [row[:-1] for row in some], range(len(some)))
        texts += [tokenizer.decode(each.tokens) for (each,) in found]
    words = read.target.sum_pieces(np.concatenate(tokens))  # (1 + W, M)
    greedy, *without = texts
    return WordOcclusion(
        losses=(words[0] - words[1:]).T, log_probabilities=words[0], greedy=greedy, without=tuple(without)
    )


def compute_token_log_probabilities(
    model: TextModel, sources: Sequence[Sequence[int]], read: SentenceAttention
) -> NDArray[np.float64]:
    """The log-probability of each token of the translation, for each of these sources: (sources, target tokens)."""
    before = make_rows(model, [read.target_before.ids] * len(sources))
    written = make_rows(model, [read.target.ids] * len(sources))
    logits: Tensor = model(make_rows(model, sources), before)
    found = logits.float().log_softmax(-1).gather(2, written[..., None])[..., 0]
    return found.double().numpy(force=True)


def compare_with_occlusion(
    attention: NDArray[np.float32], occlusion: WordOcclusion, read: SentenceAttention
) -> AttentionAgreement:
    """Compare an attention map over words with the occlusion. The start and the end of a sentence are left out."""
    rows, columns = len(read.target_words), len(read.source_words)
    weights, losses = attention[:rows, :columns], occlusion.losses[:rows]
    hits = int((weights.argmax(1) == losses.argmax(1)).sum()) if rows else 0
    ranked = [correlate_ranks(*each) for each in zip(weights, losses, strict=True)]
    known = [each for each in ranked if each is not None]
    return AttentionAgreement(hits, rows, float(np.mean(known)) if known else None)
