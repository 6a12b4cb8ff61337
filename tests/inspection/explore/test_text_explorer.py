"""The figures of a sentence: words × words, and what depends on each word."""

import numpy as np
import pytest
from support.figure_files import read_figures
from support.toy_translators import make_translator

from vitrail.base.errors import ConfigError, DataError
from vitrail.inspection.explore.text_explorer import TextExplorer
from vitrail.inspection.sentences.sentence_attention import read_sentence

SENTENCE = "Ein Hund läuft."


def test_maps_are_those_of_the_sentence() -> None:
    opened = make_translator()
    about, arrays = read_figures(TextExplorer("toy", opened).explore(SENTENCE.encode(), {}))
    expected = read_sentence(opened, SENTENCE)
    assert about["result"] == expected.translation
    assert (len(about["target"]), len(about["source"])) == arrays["weights"].shape[2:]
    assert len(about["before"]) == arrays["decoder"].shape[3]
    cross = expected.merge_words("cross")
    assert cross is not None
    np.testing.assert_allclose(arrays["weights"], cross, atol=1e-6)


def test_the_check_leaves_out_each_word() -> None:
    explorer = TextExplorer("toy", make_translator())
    shown, _ = read_figures(explorer.explore(SENTENCE.encode(), {}))
    about, arrays = read_figures(explorer.explore(SENTENCE.encode(), {"part": "check"}))
    assert arrays["without"].shape == (len(shown["target"]), len(shown["source"]) - 1)
    assert len(about["texts"]) == len(shown["source"]) - 1
    assert ((arrays["probability"] >= 0) & (arrays["probability"] <= 1)).all()


def test_a_model_without_attention_translates() -> None:
    about, arrays = read_figures(
        TextExplorer("toy", make_translator("seq2seq", attention="none")).explore(SENTENCE.encode(), {})
    )
    assert about["reasons"]["maps"]
    assert about["result"] is not None
    assert not arrays


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"a" * 3000])
def test_a_text_that_cannot_be_read_is_an_error(body: bytes) -> None:
    with pytest.raises(DataError):
        TextExplorer("toy", make_translator()).explore(body, {})


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected all or check"):
        TextExplorer("toy", make_translator()).explore(b"Hund", {"part": "layer"})
