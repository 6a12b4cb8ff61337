"""vitrail explain --sentence on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.toy_translators import save_translator

from vitrail.inspection.sentences.sentence_attention import read_sentence

Run = Callable[..., Any]
SENTENCE = "Der Hund läuft."
NAMES = [f"der-hund-läuft.{each}" for each in ("attention", "heads", "self-attention", "beam")]
NO_SENTENCE = "{} reads text; expected a model that reads images, or a --sentence to explain"


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_translator(tmp_path_factory.mktemp("models") / "model", share="none", output_bias=True)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a sentence is translated: errors must be raised before."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("the sentence was translated")

    monkeypatch.setattr("vitrail.inspection.sentences.sentence_attention.beam_search", fail)


def test_figures_page_and_one_line(
    vitrail_: Run, translator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = vitrail_("explain", translator, "--sentence", SENTENCE, "--beam", 2)
    read = read_sentence(translator, SENTENCE, beam=2)
    assert (result.code, result.err) == (0, "")
    (line,) = result.out.splitlines()
    assert line.startswith(f"{SENTENCE} → {read.translation}: attention names the most important word for ")
    assert "; the greedy translation changes without " in line
    assert line.endswith("; explained/der-hund-läuft.html")
    expected = {*(f"{name}.png" for name in NAMES), "der-hund-läuft.html"}
    assert {path.name for path in (tmp_path / "explained").iterdir()} == expected


def test_layer_head_arrays_and_json(vitrail_: Run, translator: Path, tmp_path: Path) -> None:
    words = ("--layer", "0", "--head", "1", "--arrays", "--svg", "--json", "--beam", "2")
    result = vitrail_("explain", translator, "--sentence", SENTENCE, "-o", tmp_path / "out", *words)
    assert (result.code, result.err) == (0, "")
    (found,) = json.loads(result.out)
    read = read_sentence(translator, SENTENCE, beam=2)
    chosen, cross = read.select_map("cross", 0, 1), read.cross
    assert chosen is not None
    assert cross is not None
    assert (found["sentence"], found["translation"]) == (SENTENCE, read.translation)
    assert found["source"] == ["Der", "Hund", "läuft", "."]
    assert [each["word"] for each in found["without"]] == found["source"]
    assert set(found["agreement"]) == {"hits", "words", "correlation"}
    assert found["written"][-1] == str(tmp_path / "out" / "der-hund-läuft.html")
    assert len(found["written"]) == 3 * 4 + 1
    with np.load(tmp_path / "out" / f"{NAMES[0]}.npz") as arrays:
        np.testing.assert_allclose(arrays["attention"], chosen)
        assert arrays["source"].tolist() == [*found["source"], "</s>"]
    with np.load(tmp_path / "out" / f"{NAMES[1]}.npz") as arrays:
        np.testing.assert_allclose(arrays["cross"], cross)


def test_a_model_without_attention(vitrail_: Run, tmp_path: Path) -> None:
    save_translator(tmp_path / "lstm", "seq2seq", attention="none")
    result = vitrail_("explain", tmp_path / "lstm", "--sentence", SENTENCE, "-o", tmp_path / "out", "--beam", "2")
    assert result.code == 0
    assert ": no attention: it has no attention; the greedy translation " in result.out
    expected = {f"{NAMES[0]}.png", f"{NAMES[3]}.png", "der-hund-läuft.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sentence", " "), "the --sentence is empty; expected at least one word"),
        (("--sentence", "x", "--method", "pca"), "--method does not apply, since"),
        (("--sentence", "x", "--check"), "--check does not apply, since"),
        (("example:cat", "--sentence", "x"), "an image with --sentence; expected one of them"),
        (("--sentence", "x", "--layer", "all"), "--layer 'all' for this model; expected a number from 0, or -1 for"),
        (("--sentence", "x", "--head", "max"), "--head 'max' for this model; expected a number from 0, or -1 for the"),
        (("--sentence", "x", "--beam", "0"), "--beam is 0; expected"),
        (("example:cat",), NO_SENTENCE),
        ((), NO_SENTENCE),
    ],
)
def test_wrong_options_are_one_line(
    vitrail_: Run, translator: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = vitrail_("explain", translator, *words, "-o", tmp_path / "out")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"vitrail: {message.format(translator)}")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_the_model_does_not_have(vitrail_: Run, translator: Path, tmp_path: Path) -> None:
    result = vitrail_("explain", translator, "--sentence", "x", "--layer", "2", "-o", tmp_path / "out")
    assert (result.code, result.err) == (2, "vitrail: --layer is 2; expected 0 to 1, or -1 for the last: there are 2\n")
    assert not (tmp_path / "out").exists()


def test_an_image_model_does_not_read_a_sentence(vitrail_: Run, tmp_path: Path) -> None:
    result = vitrail_("explain", "vit_fashion", "--sentence", SENTENCE, "-o", tmp_path / "out")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--sentence does not apply, since vit_fashion reads images; remove it" in result.err


@pytest.mark.usefixtures("no_search")
def test_existing_files_are_not_replaced(vitrail_: Run, translator: Path, tmp_path: Path) -> None:
    (tmp_path / "der-hund-läuft.html").write_text("mine")
    result = vitrail_("explain", translator, "--sentence", SENTENCE, "-o", tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "already exists" in result.err
    assert (tmp_path / "der-hund-läuft.html").read_text() == "mine"
