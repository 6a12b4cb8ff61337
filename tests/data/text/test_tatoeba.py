"""The bundled sentence pairs."""

import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from make_tatoeba_pairs import make_pairs, reduce_to_words

from vitrail.base.errors import DataError
from vitrail.data.text.pairs import TATOEBA_FILE, open_pairs, read_tatoeba


def test_pairs_are_short_and_unique() -> None:
    train, val = read_tatoeba()
    assert (len(train), len(val), len({*train, *val})) == (14_581, 1000, 15_581)
    for pair in (*train, *val):
        for text in pair:
            assert 1 <= len(text.split()) <= 6
            assert text == text.strip()
            assert not re.search(r"\b(fuck|ass\b|scheiß|sex)", text, re.IGNORECASE)
    assert ("Können wir Tom fragen?", "Can we ask Tom?") in {*train, *val}


def test_no_validation_sentence_is_in_a_training_pair_not_even_with_other_punctuation() -> None:
    train, val = read_tatoeba()
    for side in (0, 1):
        assert not {reduce_to_words(pair[side]) for pair in train} & {reduce_to_words(pair[side]) for pair in val}


def test_both_directions_are_open() -> None:
    there, back = open_pairs("tatoeba"), open_pairs("tatoeba", "en-de")
    assert (there.languages, back.languages) == (("de", "en"), ("en", "de"))
    assert (there.val.sources, there.val.targets) == (back.val.targets, back.val.sources)
    assert (there.notes, there.tests) == ((), {})


def test_the_file_is_small_and_has_a_licence_with_attribution() -> None:
    assert TATOEBA_FILE.stat().st_size < 500_000
    text = TATOEBA_FILE.with_name("LICENSE").read_text("utf-8")
    for words in ("Tatoeba", "Helsinki-NLP", "CC BY 2.0 FR", "https://creativecommons.org/licenses/by/2.0/fr/"):
        assert words in text
    assert hashlib.md5(gzip.decompress(TATOEBA_FILE.read_bytes())).hexdigest() == "15c9ada0cebc92cbef3258d540cd63f0"


def test_the_file_is_made_from_the_published_pairs(shared: Callable[[str], Path], tmp_path: Path) -> None:
    make_pairs(shared("text/tatoeba/deu-eng.tsv.gz"), tmp_path / "pairs.tsv.gz")
    made, own = (path.read_bytes() for path in (tmp_path / "pairs.tsv.gz", TATOEBA_FILE))
    assert gzip.decompress(made) == gzip.decompress(own)  # the packed bytes depend on the version of zlib, too


def test_near_duplicates_stay_together(tmp_path: Path) -> None:
    rows = [f"Satz {number}.\tSentence {number}." for number in range(20)]
    rows += ["satz 3!\tPhrase 3.", "Phrase drei.\tphrase 3", "ein sehr viel zu langer Satz hier\tlong"]
    (tmp_path / "a.tsv").write_text("\n".join(rows), "utf-8")
    make_pairs(tmp_path / "a.tsv", tmp_path / "b.tsv.gz", val=5)
    train, val = read_tatoeba(tmp_path / "b.tsv.gz")
    assert (len(train), len(val)) == (17, 5)
    linked = {("Satz 3.", "Sentence 3."), ("satz 3!", "Phrase 3."), ("Phrase drei.", "phrase 3")}
    assert linked <= {*train} or linked <= {*val}
    (tmp_path / "a.tsv").write_text("one column", "utf-8")
    with pytest.raises(DataError, match="does not have two columns"):
        make_pairs(tmp_path / "a.tsv", tmp_path / "b.tsv.gz")
