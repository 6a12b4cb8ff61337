"""The attention while a sentence is translated: its words, its maps, and its figures."""

import numpy as np
import pytest
import torch
from support.figure_checks import check_figure
from support.toy_translators import make_translator

from vitrail.base.errors import ConfigError, DataError
from vitrail.inspection.sentences.sentence_attention import MapKind, read_sentence
from vitrail.inspection.sentences.sentence_figures import (
    describe_map,
    draw_cross_attention,
    draw_cross_attention_heads,
    draw_self_attention,
)
from vitrail.inspection.sentences.word_occlusion import occlude_words
from vitrail.predict.translator import Translator

SENTENCE = "Der Hund läuft im Park."
KINDS: tuple[MapKind, ...] = ("cross", "encoder", "decoder")


@pytest.mark.parametrize("beam", [1, 4])
def test_the_translation_is_that_of_the_translator(beam: int) -> None:
    loaded = make_translator()
    read = read_sentence(loaded, SENTENCE, beam=beam, length=12)
    expected = Translator(loaded).translate(SENTENCE, beam=beam, length=12)
    assert (read.translation, read.best.tokens) == (expected.text, expected.ids)
    assert read.best.score == pytest.approx(expected.score)
    assert read.alternatives[0] == (read.translation, pytest.approx(read.best.score))
    assert [score for _, score in read.alternatives] == sorted((score for _, score in read.alternatives), reverse=True)


def test_maps_equal_those_of_the_model_and_are_merged_to_words() -> None:
    loaded = make_translator()
    read = read_sentence(loaded, SENTENCE, length=9)
    source, before = torch.tensor([read.source.ids]), torch.tensor([read.target_before.ids])
    with torch.inference_mode():
        expected = loaded.model.attention_maps(loaded.model.encode(source), before, source)
    for kind in KINDS:
        maps, wanted = read.find_maps(kind), vars(expected)[kind]
        assert maps is not None
        np.testing.assert_allclose(maps, wanted[0].numpy())
        words, (rows, columns) = read.merge_words(kind), read.find_sides(kind)
        assert words is not None
        assert words.shape == (*maps.shape[:2], len(rows.words), len(columns.words))
        np.testing.assert_allclose(words.sum(-1), 1, rtol=1e-5)
        first = [place for place, word in enumerate(columns.places) if word == 0]
        last = [place for place, word in enumerate(rows.places) if word == rows.places[-1]]
        by_hand = maps[:, :, last][..., first].sum(-1).mean(-1)
        np.testing.assert_allclose(words[:, :, -1, 0], by_hand, rtol=1e-5, atol=1e-8)


def test_a_row_of_the_decoder_reads_only_what_was_written_before() -> None:
    read = read_sentence(make_translator(), SENTENCE, length=9)
    assert read.decoder is not None
    assert not np.triu(read.decoder, 1).any()
    assert read.target_before.ids[1:] == read.target.ids[:-1]
    assert read.target_before.words[0] == "<s>"


def test_a_translation_without_an_end_has_no_word_for_it() -> None:
    read = read_sentence(make_translator(), SENTENCE, beam=1, length=2)
    assert not read.best.finished
    assert read.target_words == read.target.words
    assert "</s>" not in read.target.words
    assert read.source_words == ("Der", "Hund", "läuft", "im", "Park", ".")
    assert read.source.words[-1] == "</s>"


def test_layers_and_heads_are_selected() -> None:
    read = read_sentence(make_translator(), SENTENCE, length=9)
    words, chosen = read.merge_words("cross"), read.select_map("cross", 0, 1)
    assert words is not None
    assert read.layers_and_heads == (2, 2)
    np.testing.assert_array_equal(chosen, words[0, 1])
    np.testing.assert_array_equal(read.select_map("cross", -1), words[1].mean(0))
    assert describe_map(read, -1, "mean") == "layer 1, mean of 2 heads"
    assert describe_map(read, 0, -1) == "layer 0, head 1"
    with pytest.raises(ConfigError, match=r"^`layer` is 2; expected 0 to 1, or -1 for the last: there are 2$"):
        read.select_map("cross", 2)
    with pytest.raises(ConfigError, match=r"^`head` is -3; expected 0 to 1"):
        read.select_map("cross", 0, -3)


@pytest.mark.parametrize("attention", ["bahdanau", "luong"])
def test_recurrent_attention_is_one_layer_of_one_head(attention: str) -> None:
    loaded = make_translator("seq2seq", attention=attention)
    read = read_sentence(loaded, SENTENCE, length=9)
    assert read.layers_and_heads == (1, 1)
    assert read.encoder is None
    assert read.decoder is None
    assert draw_self_attention(read) is None
    assert draw_cross_attention_heads(read, occlude_words(loaded, read)) is None


def test_a_model_without_attention_says_why() -> None:
    loaded = make_translator("seq2seq", attention="none")
    read = read_sentence(loaded, SENTENCE, length=9)
    assert read.no_maps_reason == "it has no attention"
    assert read.select_map("cross") is None
    figure = draw_cross_attention(read, occlude_words(loaded, read))
    assert figure.caption.startswith("There is no attention map: it has no attention. Occlusion: ")
    assert "attention" not in figure.arrays
    check_figure(figure)


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("", "the `sentence` is empty; expected at least one word"),
        (" \n ", "the `sentence` is empty; expected at least one word"),
        ("Hund " * 40, "has 41 tokens; expected at most 40, the positions of the model: split it"),
        ("\udcff", "is not Unicode"),
    ],
)
def test_what_cannot_be_read_is_an_error(sentence: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_sentence(make_translator(length=40), sentence)


@pytest.mark.parametrize("sentence", [SENTENCE, "Hund", SENTENCE.replace(".", ", ") * 5])
def test_figures_are_complete_for_short_and_long_sentences(sentence: str) -> None:
    loaded = make_translator()
    read = read_sentence(loaded, sentence, length=9)
    occlusion = occlude_words(loaded, read)
    for figure in (
        draw_cross_attention(read, occlusion),
        draw_self_attention(read, 0, 1),
        draw_cross_attention_heads(read, occlusion),
    ):
        assert figure is not None
        check_figure(figure)


def test_the_layer_of_a_longer_encoder_is_named_by_its_own_number() -> None:
    figure = draw_self_attention(read_sentence(make_translator(), SENTENCE, length=9))
    assert figure is not None
    titles = [axes.get_title("left") for axes in figure.draw().axes]
    assert titles[:2] == ["encoder: layer 2, mean of 2 heads", "decoder: layer 1, mean of 2 heads"]


def test_words_in_a_figure_are_not_formulas() -> None:
    loaded = make_translator()
    read = read_sentence(loaded, r"$\frac{1}{0}$ Hund $x^", length=5)
    check_figure(draw_cross_attention(read, occlude_words(loaded, read)))
