"""Translation at toy size: digits and the same digits in reverse, a small model, and its saved folder."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.data.text.pairs import PairSplits, SentencePairs, open_pairs
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.models.catalog.families import build_preset
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.recipes.task_settings import TranslationSettings
from vitrail.tasks.translation import TextSource, TranslationTask

FIELDS = {"width": 16, "encoder_depth": 1, "decoder_depth": 1, "heads": 2, "mlp_width": 32}
LSTM_FIELDS = {"width": 12, "hidden": 16}
RECIPE = Recipe(
    name="toy",
    loop=LoopSettings(epochs=2, batch=64, save_every=1),
    optimization=OptimizationSettings(lr=3e-3, weight_decay=0.0),
)


@cache
def make_pairs(train: int = 120, val: int = 20) -> PairSplits:
    found = open_pairs("reversal")
    return PairSplits(
        name="toy",
        languages=found.languages,
        train=SentencePairs(found.train.sources[:train], found.train.targets[:train], "train"),
        val=SentencePairs(found.val.sources[:val], found.val.targets[:val], "val"),
    )


@cache
def make_tokenizer() -> TextTokenizer:
    pairs = make_pairs()
    return TextTokenizer.train_bpe([*pairs.train.sources, *pairs.train.targets], 30)


def make_source(batch: int = 64, batch_tokens: int = 300, train: int = 120) -> TextSource:
    return TextSource.encode(
        make_pairs(train), make_tokenizer(), batch=batch, batch_tokens=batch_tokens, max_length=100
    )


def make_model(name: str = "transformer_cpu", **fields: Any) -> Any:
    torch.manual_seed(0)
    sizes = LSTM_FIELDS if name.startswith("lstm") else FIELDS
    return build_preset(name, **{"vocabulary": make_tokenizer().vocabulary, **sizes, **fields})


def make_task(name: str = "transformer_cpu", **fields: Any) -> TranslationTask:
    return TranslationTask(make_model(name, **fields), TranslationSettings(bleu_sentences=5))


def write_text_model(folder: Path, **fields: Any) -> Path:
    """A model folder as a run of translation writes it, with random weights."""
    vitrail.save(make_model(**fields), folder, languages=("digits", "reversed"), tokenizer=make_tokenizer().to_json())
    return folder
