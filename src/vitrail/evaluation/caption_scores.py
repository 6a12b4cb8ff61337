"""How good captions are: exact matches, and BLEU by sacreBLEU against all captions of an image, with its signature."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.base.errors import ConfigError
from vitrail.evaluation.translation_scores import import_sacrebleu, is_sacrebleu_installed


@dataclass(frozen=True, kw_only=True)
class CaptionScores:
    """The scores of all captions together."""

    exact: float  # share of the captions that equal one of those of their image
    bleu: float | None  # BLEU-4, from 0 to 100; None if sacrebleu is not installed
    bleu_signature: str | None


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
