"""Sentence pairs from folders, tables and names, in both directions."""

import gzip
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.data.text.pairs import MAX_DIGITS, MIN_DIGITS, PairSplits, make_reversal, open_pairs

GERMAN = [f"Satz {number}." for number in range(40)]
ENGLISH = [f"Sentence {number}." for number in range(40)]
FRENCH = [f"Phrase {number}." for number in range(40)]
LANGUAGES = {"de": GERMAN, "en": ENGLISH, "fr": FRENCH}
MULTI30K = {"test_2016_flickr": 1000, "test_2017_flickr": 1000, "test_2017_mscoco": 461, "test_2018_flickr": 1071}


def test_targets_are_the_digits_in_reverse() -> None:
    train, val = make_reversal()
    assert (len(train), len(val), len({*train, *val})) == (8000, 500, 8500)
    for source, target in (*train, *val):
        assert target.split() == source.split()[::-1]
        assert MIN_DIGITS <= len(source.split()) <= MAX_DIGITS
    lengths = {len(source.split()) for source, _ in val}
    assert lengths == {*range(MIN_DIGITS, MAX_DIGITS + 1)}
    assert {digit for source, _ in val for digit in source.split()} == {*"0123456789"}


def test_they_are_always_the_same() -> None:
    assert make_reversal() == make_reversal()
    pairs = open_pairs("reversal", seed=7)
    assert pairs.languages == ("digits", "reversed")
    assert (pairs.train.source(0), pairs.train.target(0)) == make_reversal()[0][0]
    back = open_pairs("reversal", "reversed-digits")
    assert (back.train.source(0), back.train.target(0)) == make_reversal()[0][0][::-1]


def write_lines(path: Path, lines: list[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_parts(folder: Path, counts: Mapping[str, int], languages: str = "de en", packed: bool = False) -> Path:
    """Write files such as train.de with the first `count` sentences of each language."""
    folder.mkdir(exist_ok=True)
    for part, count in counts.items():
        for language in languages.split():
            write_lines(folder / f"{part}.{language}{'.gz' * packed}", LANGUAGES[language][:count])
    return folder


def write_table(path: Path, count: int = 40) -> Path:
    write_lines(path, ["\t".join(row) for row in zip(GERMAN[:count], ENGLISH[:count], strict=True)])
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("val", ["val", "valid", "validation", "dev", "Val"])
def test_a_folder_has_parts_by_their_names(tmp_path: Path, packed: bool, val: str) -> None:
    folder = write_parts(tmp_path / "pairs", {"train": 30, val: 5, "test_2017": 4, "test": 3}, packed=packed)
    (folder / "README.md").write_text("# about", "utf-8")
    (folder / "archive.tar.gz").write_bytes(b"")
    pairs = open_pairs(folder)
    assert (pairs.name, pairs.languages, pairs.notes) == ("pairs", ("de", "en"), ())
    assert (pairs.train.source(29), pairs.train.target(29)) == ("Satz 29.", "Sentence 29.")
    assert (len(pairs.train), len(pairs.val)) == (30, 5)
    assert {name: len(each) for name, each in pairs.tests.items()} == {"test": 3, "test_2017": 4}
    assert pairs.test == pairs.tests["test"]


def test_the_pair_chooses_languages_and_direction(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, {"train": 10, "val": 3}, "de en fr")
    for pair in ("de-en", "en-de", "fr-en", "de-fr"):
        pairs = open_pairs(folder, pair)
        source, target = pairs.languages
        assert f"{source}-{target}" == pair
        assert list(pairs.train.sources) == LANGUAGES[source][:10]
        assert list(pairs.train.targets) == LANGUAGES[target][:10]
    with pytest.raises(ConfigError, match=r"has 3 languages \(de, en, fr\); set `pair` to source and target"):
        open_pairs(folder)


def test_a_common_beginning_names_the_files_of_one_part(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, {"train": 20, "news": 30, "val": 5})
    pairs = open_pairs(str(folder / "news"), "en-de")
    assert (pairs.name, len(pairs.train) + len(pairs.val), pairs.tests) == ("news", 30, {})


def test_the_only_complete_part_of_a_folder_is_for_training(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, {"europarl-v7.de-en": 20})
    write_lines(folder / "notes.de", ["nichts"])
    assert len(open_pairs(folder, val_share=0).train) == 20
    write_parts(folder, {"news": 20})
    with pytest.raises(DataError, match=r"has several training parts \(europarl-v7\.de-en, news\); expected one"):
        open_pairs(folder)


def test_parts_that_are_not_used_are_noted(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, {"train": 20, "train_more": 10, "val": 5})
    write_lines(folder / "test_2017.de", GERMAN[:3])
    pairs = open_pairs(folder)
    assert (len(pairs.train), pairs.tests) == (20, {})
    assert pairs.notes == ("train_more is not used", "test_2017 has no en: not used")


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.tsv.gz"])
def test_a_table_has_two_columns(tmp_path: Path, name: str) -> None:
    pairs = open_pairs(write_table(tmp_path / name), val_share=0)
    assert (pairs.languages, pairs.notes) == (("source", "target"), ())
    assert (list(pairs.train.sources), list(pairs.train.targets), len(pairs.val)) == (GERMAN, ENGLISH, 0)
    pairs = open_pairs(tmp_path / name, "de-en", val_share=0)
    assert pairs.languages == ("de", "en")
    assert pairs.notes == (
        f"the columns of {name} are taken as de and en; to choose the direction by `pair`, "
        "call the file train.de-en.tsv",
    )


def test_the_name_of_a_table_gives_its_languages(tmp_path: Path) -> None:
    write_table(tmp_path / "deu-eng.tsv.gz")
    assert open_pairs(tmp_path / "deu-eng.tsv.gz").languages == ("deu", "eng")
    pairs = open_pairs(tmp_path, "eng-deu", val_share=0)
    assert (list(pairs.train.sources), list(pairs.train.targets)) == (ENGLISH, GERMAN)
    with pytest.raises(ConfigError, match=r"`pair` is de-en, but .* has no de; it has deu, eng"):
        open_pairs(tmp_path / "deu-eng.tsv.gz", "de-en")


def test_a_folder_of_tables_has_parts(tmp_path: Path) -> None:
    write_table(tmp_path / "train.de-en.tsv", 30)
    write_table(tmp_path / "dev.de-en.tsv", 4)
    write_table(tmp_path / "test.tsv.gz", 3)
    pairs = open_pairs(tmp_path, "en-de")
    assert (len(pairs.train), len(pairs.val), [*pairs.tests]) == (30, 4, ["test"])
    assert (pairs.val.source(0), pairs.val.target(0)) == ("Sentence 0.", "Satz 0.")


def test_more_columns_are_noted_and_empty_cells_left_out(tmp_path: Path) -> None:
    lines = ["Satz.\tSentence.\tCC-BY", "\tNothing.", "Nichts.\t ", "", "Ja.\tYes."]
    write_lines(tmp_path / "a.tsv", lines)
    pairs = open_pairs(tmp_path / "a.tsv", val_share=0)
    assert (list(pairs.train.sources), list(pairs.train.targets)) == (["Satz.", "Ja."], ["Sentence.", "Yes."])
    assert pairs.notes == (
        "a.tsv has 3 columns; the first two are used",
        "train: 3 pairs with an empty line left out",
    )


def test_pairs_with_an_empty_line_are_left_out_of_both_sides(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.de", ["eins", "", "drei", "  ", "fünf"])
    write_lines(tmp_path / "train.en", ["one", "two", "", "", "five"])
    pairs = open_pairs(tmp_path, val_share=0)
    assert list(zip(pairs.train.sources, pairs.train.targets, strict=True)) == [("eins", "one"), ("fünf", "five")]
    assert pairs.notes == ("train: 3 pairs with an empty line left out",)


def test_files_of_different_length_name_both_counts(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.de", GERMAN[:3])
    write_lines(tmp_path / "train.en", ENGLISH[:2])
    with pytest.raises(DataError, match=r"train\.de has 3 lines and train\.en 2; expected the same number"):
        open_pairs(tmp_path)


def test_a_table_with_one_column_names_the_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.tsv", ["Satz.\tSentence.", "Satz. Sentence."])
    with pytest.raises(DataError, match=r"line 2 of .*a\.tsv has one column; expected two"):
        open_pairs(tmp_path / "a.tsv")


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        ("de-de", "`pair` de-de has one language twice"),
        ("de-es", r"`pair` is de-es, but .* has no es; it has de, en"),
        ("german", "`pair` is 'german'; expected source and target, for example de-en"),
        ("-de", "`pair` is '-de'"),
        ("", "`pair` is ''"),
    ],
)
def test_a_wrong_pair_gives_one_line(tmp_path: Path, pair: str, match: str) -> None:
    for data in ("tatoeba", write_parts(tmp_path, {"train": 10})):
        with pytest.raises(ConfigError, match=match):
            open_pairs(data, pair)


def test_a_language_code_may_have_a_hyphen(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.zh-Hans", ["一", "二"])
    write_lines(tmp_path / "train.en", ["one", "two"])
    assert open_pairs(tmp_path, "zh-Hans-en").languages == ("zh-Hans", "en")
    assert open_pairs(tmp_path, "en-zh-Hans").train.source(0) in ("one", "two")


def test_missing_data_gives_one_line(tmp_path: Path) -> None:
    def check(data: str | Path, match: str, pair: str | None = None) -> None:
        with pytest.raises(VitrailError, match=match) as caught:
            open_pairs(data, pair)
        assert "\n" not in str(caught.value)

    check(tmp_path, "has no training pairs; expected 'tatoeba', 'reversal', 'multi30k', a folder with train.de")
    check(tmp_path / "no", "does not exist")
    check("a\0b", r"a\\x00b does not exist|cannot be opened")
    write_lines(tmp_path / "train.de", GERMAN)
    check(tmp_path, r"has files of one language \(de\); expected those of two")
    check(tmp_path / "train.de", "is one file")
    check(tmp_path, "has no en; it has de", "de-en")
    write_lines(tmp_path / "train.en", ENGLISH)
    write_lines(tmp_path / "val.de", GERMAN)
    check(tmp_path, r"val\.de has no en; expected de and en")
    write_lines(tmp_path / "val.en", [""] * 40)
    check(tmp_path, "val.en has no pairs")
    (tmp_path / "train.en").unlink()
    os.mkfifo(tmp_path / "train.en")
    check(tmp_path, "train.en cannot be read: it is a named pipe")
    (tmp_path / "endless.tsv").symlink_to("/dev/zero")
    check(tmp_path / "endless.tsv", "it is a device")


@pytest.mark.parametrize("share", [-0.1, 0.6, True, "half", float("nan")])
def test_at_most_half_can_be_held_out(share: float) -> None:
    with pytest.raises(ConfigError, match=r"`val_share` is .*; expected the share of pairs held out for validation"):
        open_pairs("tatoeba", val_share=share)


def test_pairs_are_held_out_without_a_validation_part(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, {"train": 40})
    pairs = open_pairs(folder, val_share=0.25)
    assert (len(pairs.train), len(pairs.val)) == (30, 10)
    assert pairs.notes == ("10 pairs of 40 held out for validation",)
    assert open_pairs(folder, val_share=0.25) == pairs
    back = open_pairs(folder, "en-de", val_share=0.25)
    assert (list(back.val.sources), list(back.val.targets)) == (list(pairs.val.targets), list(pairs.val.sources))
    assert open_pairs(folder, val_share=0.25, seed=1).val != pairs.val
    assert len(open_pairs(folder, val_share=0).val) == 0


def test_one_sentence_cannot_be_divided(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.de", ["Ja."] * 4)
    write_lines(tmp_path / "train.en", ["Yes."] * 4)
    pairs = open_pairs(tmp_path)
    assert (len(pairs.train), len(pairs.val)) == (4, 0)
    assert pairs.notes == ("no pairs for validation: all of them share sentences",)


def test_opened_pairs_are_returned_unchanged() -> None:
    pairs = open_pairs("reversal")
    assert open_pairs(pairs) is pairs


@pytest.mark.parametrize("pair", ["de-en", "en-fr", "cs-de"])
def test_multi30k_has_its_published_counts(shared: Callable[[str], Path], pair: str) -> None:
    pairs: PairSplits = open_pairs(shared("text/multi30k"), pair)
    assert (len(pairs.train), len(pairs.val)) == (29_000, 1014)
    expected = {name: count for name, count in MULTI30K.items() if "cs" not in pair or "2017" not in name}
    assert {name: len(each) for name, each in pairs.tests.items()} == expected
    assert pairs.test == pairs.tests["test_2016_flickr"]
    if pair == "de-en":
        assert pairs.train.source(0) == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
        assert pairs.train.target(0) == "Two young, White males are outside near many bushes."
