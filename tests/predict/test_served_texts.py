"""Models that write text, as the service runs them."""

from pathlib import Path

import pytest
from support.toy_captions import write_toy_captioner
from support.toy_translators import SENTENCES, save_translator

from vitrail.base.errors import ConfigError, DataError
from vitrail.predict.captioner import Captioner
from vitrail.predict.served_texts import ServedCaptioner, ServedTranslator, parse_search
from vitrail.predict.translator import Translator

pytest.importorskip("tokenizers", reason="needs the extra `text`")


def test_translations_are_those_of_the_translator(tmp_path: Path) -> None:
    model = str(save_translator(tmp_path / "toy"))
    served, translator = ServedTranslator(model, streams=1), Translator(model)
    for text in (*SENTENCES[:2], " two  spaces ", ""):
        settings = served.parse_settings({"beam": "3", "n_best": 2, "length": 9})
        item = served.prepare("text", text.encode(), settings)
        found = served.run(item, ["translation"])
        expected = translator.translate(text, beam=3, n_best=2, length=9)
        assert found["translation"].decode() == expected.text
        texts = [each["translation_text"] for each in served.to_json(found, settings)]
        assert texts == [expected.text, *(each.text for each in expected.alternatives)]
    for value, message in ((b"\xff", "is not valid UTF-8"), (b"a" * 5000, "has 5,000 characters; expected at most")):
        with pytest.raises(DataError, match=message):
            served.prepare("text", value, parse_search({}))


def test_captions_are_those_of_the_captioner(tmp_path: Path) -> None:
    model = str(write_toy_captioner(tmp_path / "toy"))
    served, captioner = ServedCaptioner(model, streams=1), Captioner(model)
    settings = served.parse_settings({"beam": 2})
    found = served.run(served.prepare("image", served.example, settings), ["caption"])
    expected = captioner.caption("example:cat", beam=2)
    assert found["caption"].decode() == expected.text
    assert served.to_json(found, settings)[0]["generated_text"] == expected.text
    with pytest.raises(DataError, match="is not an image"):
        served.prepare("image", b"no image", settings)


def test_a_search_has_limits() -> None:
    for given, message in (
        ({"beams": 3}, "unknown parameter 'beams'; expected beam, n_best, length"),
        ({"beam": 17}, "beam is 17; expected 1 to 16"),
        ({"length": 10**20}, "length is 10000.*; expected 1 to 512"),
        ({"n_best": "-1"}, "n_best is -1; expected 1 to 16"),
        ({"beam": 2, "n_best": 3}, "`n_best` is 3; expected at most `beam`"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_search(given)
