"""How good translations and captions are: BLEU and chrF by sacreBLEU with signatures, exact matches, perplexity."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, missing_package_error
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode

MAX_LOG_PERPLEXITY = 100.0  # the perplexity of a model that diverged stays a finite number


@dataclass(frozen=True, kw_only=True)
class CorpusScores:
    """BLEU and chrF2 of all sentences together, from 0 to 100, with the signatures that say how they were computed."""

    bleu: float
    chrf: float
    exact: float  # share of the sentences that equal their reference
    bleu_signature: str
    chrf_signature: str


@dataclass(frozen=True, kw_only=True)
class CaptionScores:
    """The scores of all captions together."""

    exact: float  # share of the captions that equal one of those of their image
    bleu: float | None  # BLEU-4, from 0 to 100; None if sacrebleu is not installed
    bleu_signature: str | None


def is_sacrebleu_installed() -> bool:
    return find_spec("sacrebleu") is not None


def import_sacrebleu() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError:
        raise missing_package_error("BLEU", "sacrebleu", "text") from None
    return sacrebleu.metrics


def score_translations(translations: Sequence[str], references: Sequence[str]) -> CorpusScores:
    """Compare translations with one reference each, cased and not tokenized before."""
    metrics = import_sacrebleu()
    if len(translations) != len(references) or not references:
        raise ConfigError(f"{len(translations)} translations for {len(references)} references; expected one of each")
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    pairs = zip(translations, references, strict=True)
    return CorpusScores(
        bleu=bleu.corpus_score(translations, [references]).score,
        chrf=chrf.corpus_score(translations, [references]).score,
        exact=sum(each == reference for each, reference in pairs) / len(references),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def score_captions(captions: Sequence[str], references: Sequence[Sequence[str]]) -> CaptionScores:
    """Compare captions with those of their images, one or several each, cased and not tokenized before."""
    if len(captions) != len(references) or not captions or not all(references):
        raise ConfigError(
            f"{len(captions)} captions and {len(references)} lists of references; expected at least one reference each"
        )
    exact = sum(caption in known for caption, known in zip(captions, references, strict=True)) / len(captions)
    if not is_sacrebleu_installed():
        return CaptionScores(exact=exact, bleu=None, bleu_signature=None)
    bleu = import_sacrebleu().BLEU()
    most = max(map(len, references))
    streams = [[known[number] if number < len(known) else None for known in references] for number in range(most)]
    score = bleu.corpus_score(list(captions), streams).score
    return CaptionScores(exact=exact, bleu=score, bleu_signature=str(bleu.get_signature()))


@torch.no_grad()
def measure_token_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    pad: int,
    device: torch.device,
    ranks: Ranks | None = None,
    compute_logits: Callable[[Batch], Tensor] | None = None,
) -> tuple[float, int]:
    """The mean cross-entropy of the target tokens, without padding and label smoothing, and their number.

    `compute_logits` is by default that of a text model, which reads `source` and `target_in`.
    """
    exact = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.zeros(2, dtype=exact, device=device)  # loss, tokens
    with temporary_eval_mode(model):
        for batch in batches:
            moved = batch.to(device)
            logits = compute_logits(moved) if compute_logits else model(moved["source"], moved["target_in"])
            target = moved["target_out"]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=pad, reduction="sum")
            sums += torch.stack([loss.to(exact), (target != pad).sum().to(exact)])
    total, tokens = (ranks or Ranks()).all_reduce_sum(sums).tolist()
    return total / max(tokens, 1), int(tokens)


def compute_perplexity(loss: float) -> float:
    """e^loss: among so many equally probable tokens, the model would be as uncertain."""
    return math.exp(min(loss, MAX_LOG_PERPLEXITY))
