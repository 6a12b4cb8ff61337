"""A model that reverses digits reads them from the end: its attention is largest on the anti-diagonal."""

from dataclasses import replace

import numpy as np
import pytest
from support.toy_translators import make_translator

from vitrail.base.errors import ConfigError
from vitrail.data.text.pairs import make_reversal, open_pairs
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.inspection.sentences.known_attention import ReversalScore, count_anti_diagonal, score_reversal
from vitrail.models.catalog.families import build_preset
from vitrail.opening import Opened
from vitrail.recipes.recipe import open_recipe
from vitrail.tasks.translation import TextSource, TranslationTask
from vitrail.train.fit import fit


def test_rows_on_the_anti_diagonal_are_counted() -> None:
    assert count_anti_diagonal(np.eye(5)[::-1]) == 5
    assert count_anti_diagonal(np.eye(5)) == 1  # the one in the middle
    assert str(ReversalScore(95, 100)) == "attention is largest on the anti-diagonal for 95 of 100 tokens, 95.0%"


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention to score: it has no attention"):
        score_reversal(make_translator("seq2seq", attention="none"), [("1 2", "2 1")])


def train_reversal(epochs: float) -> Opened:
    """The recipe `reversal`: one layer, one head."""
    recipe, data = open_recipe("reversal"), open_pairs("reversal")
    tokenizer = TextTokenizer.train_bpe([*data.train.sources, *data.train.targets], recipe.task["vocabulary"])
    model = build_preset(str(recipe.model), **{**recipe.fields, "vocabulary": tokenizer.vocabulary})
    source = TextSource.encode(
        data, tokenizer, batch=recipe.loop.batch, batch_tokens=recipe.task["batch_tokens"], max_length=100
    )
    loop = replace(recipe.loop, epochs=epochs, eval_every=0)
    result = fit(TranslationTask(model), source, replace(recipe, loop=loop), device="cpu")
    return Opened(source="reversal", kind="text", model=result.model.eval(), tokenizer=tokenizer)


def test_random_weights_are_not_on_the_anti_diagonal() -> None:
    loaded = make_translator(encoder_depth=1, decoder_depth=1, heads=1)
    score = score_reversal(loaded, make_reversal()[1][:20], layer=0, head=0)
    assert score.tokens == sum(len(source.split()) for source, _ in make_reversal()[1][:20])
    assert score.share < 0.5


@pytest.mark.slow
def test_trained_attention_is_on_the_anti_diagonal_for_95_percent_of_the_tokens() -> None:
    """After half of the recipe's 12 epochs."""
    score = score_reversal(train_reversal(epochs=7), make_reversal()[1][:200])
    assert score.share >= 0.95, str(score)
