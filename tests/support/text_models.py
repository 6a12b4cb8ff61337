"""Small models that read text, one of each kind, and sentences for them."""

from typing import Any

import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor

from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.models.catalog.families import load_family

VOCABULARY, PAD = 23, 0
SMALL: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "width": 16,
    "encoder_depth": 2,
    "decoder_depth": 2,
    "heads": 2,
    "mlp_width": 24,
}
LSTM: dict[str, Any] = {"vocabulary": VOCABULARY, "width": 8, "hidden": 12}
NO_ENCODER: dict[str, Any] = {**SMALL, "encoder_depth": 0, "memory_width": 10}
TEXT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "post-norm": ("transformer", SMALL),
    "pre-norm": ("transformer", {**SMALL, "norm": "pre"}),
    "dot": ("transformer", {**SMALL, "score": "dot"}),
    "additive": ("transformer", {**SMALL, "score": "additive"}),
    "free widths": ("transformer", {**SMALL, "key_width": 5, "value_width": 7}),
    "learned positions, gelu": ("transformer", {**SMALL, "positions": "learned", "length": 30, "activation": "gelu"}),
    "share target": ("transformer", {**SMALL, "share": "target", "source_vocabulary": 31}),
    "share none, output bias": ("transformer", {**SMALL, "share": "none", "output_bias": True}),
    "no attention bias": ("transformer", {**SMALL, "attention_bias": False}),
    "no encoder": ("transformer", NO_ENCODER),
    "no encoder, pre-norm, additive": ("transformer", {**NO_ENCODER, "norm": "pre", "score": "additive"}),
    "lstm": ("seq2seq", {**LSTM, "attention": "none"}),
    "bahdanau": ("seq2seq", LSTM),
    "bahdanau, 2 layers": ("seq2seq", {**LSTM, "depth": 2, "attention_width": 5, "bidirectional": False}),
    "luong dot": ("seq2seq", {**LSTM, "attention": "luong", "luong_score": "dot"}),
    "luong general": ("seq2seq", {**LSTM, "attention": "luong", "depth": 2}),
    "luong concat": ("seq2seq", {**LSTM, "attention": "luong", "luong_score": "concat", "share": "none"}),
    "luong without feeding": ("seq2seq", {**LSTM, "attention": "luong", "input_feeding": False}),
}


def build_text_model(case: str, **fields: Any) -> TextModel:
    """In evaluation mode, with weights so large that outputs differ clearly."""
    name, own = TEXT_CASES[case]
    family = load_family(name)
    torch.manual_seed(0)
    model = family.build(family.configure(**{**own, **fields}))
    assert isinstance(model, TextModel)
    return add_weight_noise(model).eval()


def draw_sentences(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids without padding."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def pad_rows(tokens: Tensor, lengths: list[int]) -> Tensor:
    """The rows cut to these lengths and filled up with padding."""
    kept = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    return tokens.where(kept, torch.tensor(PAD))


def read_source(model: TextModel, source: Tensor) -> Memory:
    """The memory of the sentences; for a model without encoder, some vector for each token."""
    if model.config.__dict__.get("encoder_depth", 1):
        return model.encode(source)
    table = torch.randn(VOCABULARY, model.config.memory_width, generator=torch.Generator().manual_seed(1))
    return Memory(table[source], source != PAD)
