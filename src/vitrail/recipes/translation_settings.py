"""Settings of the task translation: `task` in a recipe, options of `vitrail train`. torch is not imported."""

from dataclasses import dataclass

from vitrail.data.images.augment.config import field_with_help
from vitrail.models.base.checks import MAY_BE_ZERO
from vitrail.recipes.pretraining_settings import CheckedSettings


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(CheckedSettings):
    """Translation: predict each target token from the source and the target tokens before it."""

    batch_tokens: int = field_with_help(
        1000, "Source and target tokens per step, about; batch limits the number of sentences."
    )
    tokenizer: str = field_with_help(
        "bpe", "Tokenizer: bpe or wordpiece is trained on the training pairs; or a tokenizer.json or BERT's vocab.txt."
    )
    vocabulary: int = field_with_help(4000, "Tokens of a tokenizer that is trained, for both languages together.")
    max_length: int = field_with_help(100, "Leave out training pairs with more tokens than this on one side.")
    bleu_sentences: int = field_with_help(
        200, "Validation sentences to translate at the end of a run, for BLEU and chrF; 0 disables it.", MAY_BE_ZERO
    )
