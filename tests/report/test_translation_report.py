"""The page of a translation: nothing but its own script runs, and all text is text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.toy_translators import make_translator

from vitrail.base.figures import FigureFolder
from vitrail.report.html_page import allow_script
from vitrail.report.translation_report import (
    SCRIPT_FILES,
    ExplainedSentence,
    explain_sentence,
    join_modules,
    name_files,
    render_translation_page,
    write_sentence_explanation,
)

EVIL = '</script><script>alert(1)</script> "><img src=x onerror=alert(1)> Hund & <b>läuft</b>'


def read_data(page: str) -> list[dict[str, Any]]:
    (found,) = re.findall(r'<script type="application/json" id="maps">(.*?)</script>', page)
    return json.loads(found)


@pytest.fixture(scope="module")
def explained() -> ExplainedSentence:
    return explain_sentence(make_translator(length=16), "Der Hund läuft.", beam=2)


def test_the_numbers_of_the_page_are_those_of_the_maps(explained: ExplainedSentence) -> None:
    page = render_translation_page(explained)
    cross, encoder, decoder = read_data(page)
    read = explained.read
    for data, kind in ((cross, "cross"), (encoder, "encoder"), (decoder, "decoder")):
        words = read.merge_words(kind)  # pyright: ignore[reportArgumentType]
        assert words is not None
        shape = (len(data["attention"]), len(data["attention"][0]) - 1, *words.shape[2:])
        assert shape == words.shape
        assert abs(data["attention"][0][1][0][0] - 1000 * words[0, 1, 0, 0]) <= 0.5
        assert abs(data["attention"][1][-1][0][0] - 1000 * words[1, :, 0, 0].mean()) <= 0.5  # the mean over the heads
    assert "occlusion" not in encoder
    losses = explained.occlusion.losses
    assert abs(cross["occlusion"][0][1] - 1000 * losses[0, 1]) <= 0.5
    assert {row[-1] for row in cross["occlusion"]} == {0}  # the end is never left out
    assert "attention names the most important word for" in cross["notes"][0][0]


def test_only_the_script_of_the_page_is_allowed(explained: ExplainedSentence) -> None:
    page = render_translation_page(explained)
    script = join_modules(SCRIPT_FILES)
    assert page.count("<script") == 2  # the numbers, and the script
    assert f"<script>{script}</script>" in page
    assert allow_script(script) in page
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)


def test_a_hostile_sentence_is_text() -> None:
    page = render_translation_page(explain_sentence(make_translator(), EVIL, beam=2))
    assert page.count("<script") == 2
    assert "<img src=x" not in page
    assert "<b>" not in re.sub(r"<figcaption><b>Figure", "", page)
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


def test_a_model_without_attention_has_a_page_of_occlusion() -> None:
    explained = explain_sentence(make_translator("seq2seq", attention="none"), "Der Hund läuft.", beam=2)
    (data,) = read_data(render_translation_page(explained))
    assert set(data) == {"occlusion", "note"}
    assert explained.agreement is None
    assert str(explained).split(": ")[1:3] == ["no attention", explained.verdict.split(": ")[1]]
    assert [each.name for each in explained.figures] == ["der-hund-läuft.attention", "der-hund-läuft.beam"]


def test_an_empty_translation_has_a_page() -> None:
    loaded = make_translator("seq2seq", output_bias=True)
    loaded.model.get_parameter("output.bias").data[loaded.tokenizer.end] = 100.0
    explained = explain_sentence(loaded, "Der Hund läuft.", beam=2)
    assert explained.read.translation == ""
    assert explained.read.target_words == ()
    page = render_translation_page(explained)
    assert "<h1>An empty translation</h1>" in page
    assert "there is no target word" in explained.verdict


def test_files_and_their_names(tmp_path: Path) -> None:
    loaded = make_translator(length=16)
    out = FigureFolder(path=tmp_path, kinds=(".png", ".svg"), arrays=True)
    _, written = write_sentence_explanation(loaded, "Der Hund läuft.", out, beam=2)
    names = [f"der-hund-läuft.{each}" for each in ("attention", "heads", "self-attention", "beam")]
    expected = [f"{name}{kind}" for name in names for kind in (".png", ".svg", ".npz")]
    assert [path.name for path in written] == [*expected, "der-hund-läuft.html"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    assert name_files("../../$x$ <b>\n") == "x-b"
    assert name_files("¿?") == "sentence"
    assert len(name_files("wort " * 50)) <= 40
