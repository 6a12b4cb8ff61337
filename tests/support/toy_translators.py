"""Small models that translate, with their tokenizer: random weights, or trained to copy what can be known."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.models.base.text_contract import TextModel
from vitrail.models.catalog.families import load_family
from vitrail.opening import Opened

SENTENCES = (
    "Ein Hund läuft im Park.",
    "Der Hund ist müde, aber er läuft.",
    "Ich weiß, wie's geht!",
    "A dog runs in the park.",
    "The dog is tired, but it runs.",
    "I know how it's done!",
)
TRANSFORMER = {"width": 32, "encoder_depth": 3, "decoder_depth": 2, "heads": 2, "mlp_width": 32, "norm": "pre"}
LSTM = {"width": 16, "hidden": 16}


@cache
def train_toy_tokenizer(kind: str = "bpe", vocabulary: int = 80) -> TextTokenizer:
    pytest.importorskip("tokenizers", reason="needs the extra `text`")
    return TextTokenizer.train(kind, SENTENCES * 2, vocabulary)


def make_translator(family: str = "transformer", kind: str = "bpe", **fields: Any) -> Opened:
    """A translator with random weights, as `open_model` returns it."""
    tokenizer = train_toy_tokenizer(kind)
    sizes = TRANSFORMER if family == "transformer" else LSTM
    found = load_family(family)
    torch.manual_seed(0)
    model = found.build(
        found.configure(**{**sizes, "vocabulary": tokenizer.vocabulary, "pad": tokenizer.pad, **fields})
    )
    assert isinstance(model, TextModel)
    return Opened(
        source="toy", kind="text", model=add_weight_noise(model, 0.2), tokenizer=tokenizer, languages=("de", "en")
    )


def save_translator(folder: Path, family: str = "transformer", **fields: Any) -> Path:
    """The folder of a translator with random weights."""
    loaded = make_translator(family, **fields)
    vitrail.save(loaded.model, folder, languages=loaded.languages, tokenizer=loaded.tokenizer.to_json())
    return folder
