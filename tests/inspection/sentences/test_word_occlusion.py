"""Words are left out one by one: what the translation loses, and whether attention has named it."""

import numpy as np
import pytest
import torch
from support.toy_translators import make_translator

from vitrail.inspection.attention.attention_distance import correlate_ranks, rank_values
from vitrail.inspection.sentences.sentence_attention import read_sentence
from vitrail.inspection.sentences.word_occlusion import (
    AttentionAgreement,
    WordOcclusion,
    compare_with_occlusion,
    occlude_words,
)
from vitrail.predict.translator import Translator

SENTENCE = "Der Hund läuft im Park."


@pytest.mark.parametrize(
    ("family", "fields"),
    [("transformer", {}), ("seq2seq", {"attention": "none"}), ("seq2seq", {"attention": "luong"})],
)
def test_losses_equal_the_log_probabilities_of_each_shorter_sentence_alone(family: str, fields: dict[str, str]) -> None:
    loaded = make_translator(family, **fields)
    read = read_sentence(loaded, SENTENCE, length=9)
    found = occlude_words(loaded, read)
    assert found.losses.shape == (len(read.target.words), 6)

    def score(source: list[int]) -> np.ndarray:
        before = torch.tensor([read.target_before.ids])
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([source]), before)[0].double().log_softmax(-1)
        tokens = [float(row[token]) for row, token in zip(logits, read.target.ids, strict=True)]
        return np.bincount(read.target.places, tokens)

    complete = score([*read.source.ids])
    np.testing.assert_allclose(found.log_probabilities, complete, rtol=1e-4)
    assert complete.sum() == pytest.approx(read.best.log_probability, rel=1e-4)
    for word in range(6):
        np.testing.assert_allclose(found.losses[:, word], complete - score(read.source.drop_word(word)), atol=1e-4)
    np.testing.assert_allclose(found.totals, found.losses.sum(0))


def test_greedy_translations_are_those_of_the_sentence_without_the_word() -> None:
    loaded = make_translator()
    found = occlude_words(loaded, read_sentence(loaded, SENTENCE))
    translator = Translator(loaded)
    assert found.greedy == translator.translate(SENTENCE, beam=1).text
    shorter = ["Hund läuft im Park.", "Der läuft im Park.", "Der Hund im Park.", "Der Hund läuft Park."]
    assert found.without[:4] == tuple(each.text for each in translator.translate(shorter, beam=1))
    assert found.changed == tuple(each != found.greedy for each in found.without)


def test_a_sentence_of_one_word_can_be_occluded() -> None:
    loaded = make_translator()
    found = occlude_words(loaded, read_sentence(loaded, "Hund"))
    assert found.losses.shape[1] == 1
    assert str(found).startswith("without its only word the greedy translation ")


def make_occlusion(losses: list[list[float]]) -> WordOcclusion:
    values = np.array(losses)
    return WordOcclusion(losses=values, log_probabilities=np.zeros(len(values)), greedy="x", without=("x", "y", "x"))


def test_the_verdict_counts_words_and_leaves_out_the_end() -> None:
    loaded = make_translator()
    read = read_sentence(loaded, "Hund Hund Hund", beam=1, length=2)  # two tokens, without an end
    assert len(read.source_words) == 3
    rows = len(read.target_words)
    attention = np.array([[0.1, 0.2, 0.1, 0.6], [0.3, 0.1, 0.2, 0.4]], np.float32)[:rows]
    occlusion = make_occlusion([[0.0, 3.0, -1.0], [0.5, 0.7, 0.6]][:rows])
    found = compare_with_occlusion(attention, occlusion, read)
    assert (found.hits, found.words) == (1, rows)  # the end has the largest weight, but is not a word
    assert str(AttentionAgreement(14, 20, 0.5)) == (
        "attention names the most important word for 14 of 20 target words (rank correlation 0.50)"
    )
    assert str(AttentionAgreement(0, 0, None)).startswith("there is no target word")
    assert str(occlusion) == "the greedy translation changes without 1 of 3 words"


def test_ranks_of_equal_values_are_their_mean() -> None:
    np.testing.assert_array_equal(rank_values(np.array([3.0, 1.0, 3.0, 2.0])), [2.5, 0, 2.5, 1])


def test_rank_correlation() -> None:
    values = np.array([0.1, 0.5, 0.2, 0.9])
    assert correlate_ranks(values, values**3) == pytest.approx(1)
    assert correlate_ranks(values, -values) == pytest.approx(-1)
    assert correlate_ranks(values, np.array([1.0, 2.0, 4.0, 3.0])) == pytest.approx(0.4)  # 1 − 6·6/(4·15)
    assert correlate_ranks(values, np.ones(4)) is None
    assert correlate_ranks(values[:1], values[:1]) is None
