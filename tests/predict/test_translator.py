"""Translator: alone as in a batch, in order, with alternatives; long, empty and unknown input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_notebook import FakeNotebook
from support.toy_translation import make_model, make_pairs, make_tokenizer, write_text_model

import vitrail
from vitrail.base import progress
from vitrail.base.errors import CheckpointError, ConfigError, DataError
from vitrail.opening import Opened, open_model
from vitrail.predict.search.greedy_and_sampling import greedy
from vitrail.predict.search.settings import GREEDY, SearchSettings
from vitrail.predict.translator import Translator

TEXTS = list(make_pairs().val.sources)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "model", length=40)


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    return Translator(folder, device="cpu")


def test_is_opened_with_its_tokenizer_and_languages(translator: Translator, folder: Path) -> None:
    assert translator.languages == ("digits", "reversed")
    assert translator.tokenizer.to_json() == make_tokenizer().to_json()
    assert repr(translator.loaded).startswith(f"Opened({str(folder)!r}, text, Transformer, 6,")
    again = Translator(translator.loaded)
    assert again.model is translator.model
    assert vitrail.Translator is Translator


@pytest.mark.parametrize("name", ["transformer_cpu", "lstm_bahdanau_cpu"])
@pytest.mark.parametrize("beam", [1, 3])
def test_alone_as_in_a_batch_and_in_order(name: str, beam: int) -> None:
    """Sentences are sorted by length for the batches, and their order is restored."""
    loaded = Opened(source="toy", kind="text", model=make_model(name).eval(), tokenizer=make_tokenizer())
    alone = [Translator(loaded).translate(text, beam=beam) for text in TEXTS]
    for batch in (3, 64):
        found = Translator(loaded, batch=batch).translate(TEXTS, beam=beam)
        assert [each.source for each in found] == TEXTS
        assert [each.ids for each in found] == [each.ids for each in alone]
        assert [each.score for each in found] == pytest.approx([each.score for each in alone], abs=1e-4)


def test_progress_counts_the_sentences_of_a_list(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = FakeNotebook.install(monkeypatch)
    monkeypatch.setattr(progress, "MIN_SECONDS", 0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)
    translator.translate(TEXTS[0], beam=1)
    translator.translate(TEXTS[:2], beam=1, progress=False)
    assert not notebook.shown
    translator.translate(TEXTS[:2], beam=1)
    assert 'value="2" max="2"' in notebook.shown[-2]


def test_beam_one_is_greedy_search(translator: Translator) -> None:
    tokenizer, model = translator.tokenizer, translator.model
    source = torch.tensor([[*tokenizer.encode(TEXTS[:1])[0], tokenizer.end]])
    [expected] = greedy(model, model.encode(source), start=tokenizer.start, end=tokenizer.end, length=40)
    found = translator.translate(TEXTS[0], beam=1)
    assert (found.ids, found.score, found.finished) == (expected.tokens, expected.score, expected.finished)
    assert found.text == str(found) == tokenizer.decode(expected.tokens)
    assert found.tokens == tuple(map(tokenizer.show_token, expected.tokens))


def test_alternatives_are_the_next_best(translator: Translator) -> None:
    best = translator.translate(TEXTS[0], beam=5, n_best=4)
    assert len(best.alternatives) == 3
    assert len({best.ids, *(each.ids for each in best.alternatives)}) == 4
    scores = [best.score, *(each.score for each in best.alternatives)]
    assert scores == sorted(scores, reverse=True)


def test_length_is_limited(translator: Translator) -> None:
    """By default to 50 more tokens than the source has, and to the positions of the model."""
    assert len(translator.translate(TEXTS[0], beam=1, length=3).ids) <= 3
    assert SearchSettings().limit_length(8, None) == 58
    assert SearchSettings().limit_length(8, 40) == 40
    assert SearchSettings(length=5).limit_length(8, None) == 5


def test_draws_depend_on_the_seed_and_the_place_alone(folder: Path) -> None:
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 10, "n_best": 2}
    first, second = (Translator(folder, batch=batch).translate(TEXTS, **settings) for batch in (2, 64))
    assert [each.ids for each in first] == [each.ids for each in second]
    other = Translator(folder).translate(TEXTS, **settings, seed=1)
    assert [each.ids for each in first] != [each.ids for each in other]
    assert len(first[0].alternatives) == 1


def test_resuming_in_the_middle_gives_the_same(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks start at the same places, so that batches, and with them rounding errors, are the same."""
    monkeypatch.setattr("vitrail.predict.translator.BATCHES_PER_CHUNK", 2)
    small, done = Translator(translator.loaded, batch=3), list[int]()
    texts = TEXTS[:15]
    everything = list(small.iterate(texts, GREEDY, progress=done.append))
    assert sum(done) == 15
    for first in (1, 6, 14, 15):
        assert list(small.iterate(texts, GREEDY, first)) == everything[first:]


def test_long_empty_and_unknown_text(translator: Translator) -> None:
    with pytest.raises(DataError, match=r"^sentence 2 has 61 tokens; expected at most 40, .* model: split it$"):
        translator.translate(["1 2", " ".join("1" * 60)])
    empty, unknown = translator.translate(["", "1 猫 2"])
    assert (empty.text, empty.unknown, unknown.unknown) == ("", 0, 1)
    assert translator.translate([]) == []


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "text": (lambda t: t.translate(5), "the text is 5; expected a string, or a list of strings"),
    "list": (lambda t: t.translate(["a", 5]), "the text is .*; expected a string, or a list"),
    "beam": (lambda t: t.translate("1", beam=0), "`?beam`? is 0; expected 1 or more"),
    "wide beam": (lambda t: t.translate("1", beam=100_000), "`?beam`? is 100000; expected at most 100"),
    "many draws": (lambda t: t.translate("1", n_best=101, top_k=2), "`?n_best`? is 101; expected at most 100"),
    "n_best": (lambda t: t.translate("1", beam=2, n_best=3), "`n_best` is 3; expected at most `beam`, 2"),
    "penalty": (lambda t: t.translate("1", penalty="none"), "unknown `penalty` 'none'"),
    "alpha": (lambda t: t.translate("1", alpha=-1), "`alpha` is -1"),
    "temperature": (lambda t: t.translate("1", temperature=0), "`temperature` is 0"),
    "top_p": (lambda t: t.translate("1", top_p=-1), "`top_p` is -1"),
    "batch": (lambda t: Translator(t.loaded, batch=0), "`?batch`? is 0; expected 1 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_one_line(translator: Translator, name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as raised:
        call(translator)
    assert "\n" not in str(raised.value)


def test_models_that_cannot_translate_are_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="vit_fashion reads images; expected a model that reads text: use vitrail predict"
    ):
        Translator("vit_fashion")
    with pytest.raises(ConfigError, match="timm:vit reads images; expected a model that reads text"):
        Translator("timm:vit")
    with pytest.raises(CheckpointError, match="the model is None; expected a name"):
        Translator(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match="nothing"):
        Translator(tmp_path / "nothing")
    broken = write_text_model(tmp_path / "model")
    (broken / "tokenizer.json").write_text((folder / "tokenizer.json").read_text("utf-8") + " ", "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not the tokenizer that the model was trained with"):
        open_model(broken, kind="text")
    (broken / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; expected the tokenizer that the model"):
        open_model(broken, kind="text")
    other = tmp_path / "other"
    vitrail.save(make_model(vocabulary=99), other, tokenizer=make_tokenizer().to_json())
    with pytest.raises(CheckpointError, match="has 99 tokens and padding 0, but its tokenizer 25 and 0"):
        open_model(other, kind="text")


def test_folders_of_images_have_no_fields_of_text(tmp_path: Path) -> None:
    """So that earlier versions read them."""
    vitrail.save(vitrail.create("ViT-Ti/16", image_size=32, depth=1, classes=2), tmp_path / "model")
    text = (tmp_path / "model" / "config.json").read_text("utf-8")
    assert "languages" not in text
    assert "tokenizer" not in text
    assert vitrail.describe(tmp_path / "model").languages is None


def test_a_model_of_text_is_loaded_as_any_other(folder: Path) -> None:
    model: Any = vitrail.load(folder)
    about = vitrail.describe(folder)
    assert (about.languages, about.config["vocabulary"]) == (("digits", "reversed"), model.config.vocabulary)
    assert about.tokenizer is not None
    assert len(about.tokenizer) == 64
    loaded = open_model(folder, fields={"dropout": 0.5}, kind="text")
    assert loaded.model.config.dropout == 0.5


def test_damaged_languages_are_one_line(tmp_path: Path) -> None:
    folder = write_text_model(tmp_path / "model")
    text = (folder / "config.json").read_text("utf-8")
    for name, value in (("languages", "5"), ("languages", '["de"]'), ("tokenizer", "5")):
        about = json.loads(text)
        about.pop("checksum", None)
        (folder / "config.json").write_text(json.dumps({**about, name: json.loads(value)}), "utf-8")
        with pytest.raises(CheckpointError, match=f"{name} is "):
            open_model(folder, kind="text")
