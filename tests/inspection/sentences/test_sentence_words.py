"""Tokens are grouped into words, and maps over tokens become maps over words."""

import numpy as np
import pytest
from support.toy_translators import SENTENCES, train_toy_tokenizer

from vitrail.inspection.sentences.sentence_attention import SentenceWords


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_words_are_those_of_the_text_for_every_tokenizer(kind: str, sentence: str) -> None:
    tokenizer = train_toy_tokenizer(kind)
    found = SentenceWords.from_text(tokenizer, sentence)
    expected = sentence.replace(".", " .").replace(",", " ,").replace("!", " !").split()
    assert list(found.words) == expected
    assert list(found.ids) == tokenizer.encode([sentence])[0]
    assert SentenceWords.from_ids(tokenizer, found.ids) == found


def test_special_tokens_are_words_of_their_own() -> None:
    tokenizer = train_toy_tokenizer()
    ids = [tokenizer.start, *tokenizer.encode(["Ein"])[0], tokenizer.unknown, tokenizer.unknown, tokenizer.end]
    assert SentenceWords.from_ids(tokenizer, ids).words == ("<s>", "Ein", "<unk>", "<unk>", "</s>")


def test_an_unknown_character_is_shown_as_it_is() -> None:
    found = SentenceWords.from_text(train_toy_tokenizer(), "Hund 犬 ist")
    assert found.words == ("Hund", "犬", "ist")
    assert train_toy_tokenizer().unknown in found.ids


def test_accents_and_vowel_signs_do_not_divide_words() -> None:
    found = SentenceWords.group(range(4), [("हि", True), ("न्दी", False), (".", False), ("x", False)], ())
    assert found.words == ("हिन्दी", ".", "x")


def test_a_space_belongs_to_the_word_that_follows_it() -> None:
    found = SentenceWords.group(range(5), [("␣", True), ("E", False), ("in", False), ("␣", True), ("Hund", False)], ())
    assert (found.words, found.places) == (("Ein", "Hund"), (0, 0, 0, 1, 1))
    assert SentenceWords.group([5], [("␣", True)], ()).words == ("␣",)
    unknown = SentenceWords.from_text(train_toy_tokenizer(), "3 1")  # ▁ is known, the digits are not
    assert (unknown.words, len(unknown.ids)) == (("3", "1"), 4)


def test_an_empty_piece_is_shown() -> None:
    assert SentenceWords.group([5, 6], [("", True), ("a", True)], ()).words == ("□", "a")


def test_columns_are_summed_and_rows_averaged() -> None:
    words = SentenceWords((7, 8, 9), ("a", "b", "c"), (0, 0, 1))
    values = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.0, 0.0, 1.0]])
    np.testing.assert_allclose(words.sum_pieces(values), [[0.75, 0.25], [0.3, 0.7], [0.0, 1.0]])
    np.testing.assert_allclose(words.average_pieces(values), [[0.3, 0.225, 0.475], [0.0, 0.0, 1.0]])
    merged = words.average_pieces(words.sum_pieces(values))
    np.testing.assert_allclose(merged.sum(1), 1)


def test_all_pieces_of_a_word_are_dropped() -> None:
    words = SentenceWords((7, 8, 9), ("a", "b", "c"), (0, 0, 1)).append(2, "</s>")
    assert words.words == ("ab", "c", "</s>")
    assert (words.drop_word(0), words.drop_word(1)) == ([9, 2], [7, 8, 2])
