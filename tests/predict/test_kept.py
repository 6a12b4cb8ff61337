"""What is kept between two calls, and that nothing depends on it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import HOW, LABELS, Exports, by_hand, noise, shares, toy

from vitrail.errors import CheckpointError
from vitrail.export.exported import CONFIG, MODEL, Exported
from vitrail.predict.kept import (
    cache_folder,
    export_folder,
    kept_export,
    kept_int8,
    measured_file,
    recall,
    remember,
)
from vitrail.predict.predictor import Predictor
from vitrail.predict.viewer import Viewer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_what_was_measured_is_recalled(home: Path) -> None:
    assert recall("a") is None
    remember("a", {"x": 1})
    remember("b", {"y": [2]})
    assert (recall("a"), recall("b"), recall("c")) == ({"x": 1}, {"y": [2]}, None)
    remember("a", {"x": 3})
    assert recall("a") == {"x": 3}
    assert sorted((cache_folder() / "engines").iterdir()) == sorted(map(measured_file, "ab")), "one file per key"
    assert cache_folder() == home / ".cache" / "vitrail"


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"a"', "\x00", "[" * 100_000, '{"a": 5}', '{"a": [1]}'])
def test_a_file_that_is_not_ours_is_survived(text: str) -> None:
    measured_file("a").parent.mkdir(parents=True)
    measured_file("a").write_text(text)
    assert recall("a") is None
    remember("a", {"x": 1})
    assert recall("a") == {"x": 1}


def test_speeds_of_another_key_or_with_a_flipped_bit_are_measured_again() -> None:
    remember("a", {"x": 1})
    text = measured_file("a").read_bytes()
    measured_file("b").write_bytes(text)
    assert recall("b") is None, "the file of another key"
    for place in range(len(text)):
        measured_file("a").write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        assert recall("a") in (None, {"x": 1}), place
    measured_file("a").write_text('{"key": "a", "measured": {"x": 1}}')
    assert recall("a") is None, "without a checksum it is not ours"


def test_bytes_that_are_no_text_are_survived() -> None:
    measured_file("a").parent.mkdir(parents=True)
    measured_file("a").write_bytes(b"\xff\xfe\x00{")
    assert recall("a") is None
    remember("a", {"x": 1})
    assert recall("a") == {"x": 1}


def test_a_cache_that_cannot_be_written_is_survived(home: Path) -> None:
    home.write_text("a file where a folder should be")
    remember("a", {"x": 1})
    assert recall("a") is None
    home.unlink()
    measured_file("a").mkdir(parents=True)
    remember("a", {"x": 1})
    assert recall("a") is None
    assert list((cache_folder() / "engines").iterdir()) == [measured_file("a")], "nothing is left lying about"


def test_nobodys_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    remember("a", {"x": 1})
    assert recall("a") is None
    with pytest.raises(CheckpointError, match=r"Could not determine home directory.*set HOME"):
        cache_folder()


def viewer(name: str = "vit", **fields: Any) -> Viewer:
    return Viewer(toy(name, **fields), preprocessing=HOW, labels=LABELS)


def test_an_export_is_known_by_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first = export_folder(viewer(), "logits", merge=0, precision="fp32")
    assert first == export_folder(viewer(), "logits", merge=0, precision="fp32")
    assert first.parent == cache_folder() / "exports"
    moved, other = viewer(), viewer()
    moved.model.head.bias.data += 1
    other.preprocessing = Viewer(toy("vit"), preprocessing=HOW.changed({"crop": 0.9})).preprocessing
    places = {
        first,
        export_folder(viewer(), "class", merge=0, precision="fp32"),
        export_folder(viewer(), "logits", merge=1, precision="fp32"),
        export_folder(viewer(), "logits", merge=0, precision="int8"),
        export_folder(viewer("vit any size"), "logits", merge=0, precision="fp32"),
        export_folder(viewer(activation="gelu_tanh"), "logits", merge=0, precision="fp32"),
        export_folder(moved, "logits", merge=0, precision="fp32"),
        export_folder(other, "logits", merge=0, precision="fp32"),
    }
    monkeypatch.setattr("vitrail.predict.kept.__version__", "9.9.9")
    places.add(export_folder(viewer(), "logits", merge=0, precision="fp32"))
    assert len(places) == 9


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, exported: Exports) -> list[Path]:
    """The folders that were written, in the time of a copy."""
    found = list[Path]()

    def write(_: Any, folder: Path, *, to: str, **__: Any) -> None:
        found.append(folder)
        shutil.copytree(exported("onnx" if to == "onnx" else "int8"), folder, dirs_exist_ok=True)

    monkeypatch.setattr("vitrail.export.writing.export_model", write)
    return found


def test_it_is_written_once(written: list[Path]) -> None:
    pixels = noise()
    for _ in range(2):
        predictor = Predictor(toy("vit"), preprocessing=HOW, labels=[*"abcde"], engine="onnx")
        assert np.abs(shares(predictor.engine.run(pixels)) - by_hand(toy("vit"), pixels)).max() < 1e-5
        assert predictor.labels == tuple("abcde")
        assert predictor.engine.name == "onnx"
    assert len(written) == 1
    assert Predictor(toy("vit"), preprocessing=HOW, engine="int8").engine.name == "int8"
    assert len(written) == 2


def cut_off(folder: Path) -> None:
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:3000])


def emptied(folder: Path) -> None:
    (folder / MODEL).write_bytes(b"")


def without_model(folder: Path) -> None:
    (folder / MODEL).unlink()


def without_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def without_words(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def of_another_format(folder: Path) -> None:
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace('"format": 1', '"format": 0'))


@pytest.mark.parametrize("damage", [cut_off, emptied, without_model, without_config, without_words, of_another_format])
def test_one_that_was_damaged_is_written_again(damage: Callable[[Path], None], written: list[Path]) -> None:
    place = kept_export(viewer(), "logits", merge=0, precision="fp32")
    damage(place)
    predictor = Predictor(toy("vit"), preprocessing=HOW, engine="onnx")
    assert len(written) == 2
    assert predictor.engine.run(noise()).shape == (3, 5)
    assert json.loads((place / CONFIG).read_text())["format"] == 1


def test_one_that_stays_damaged_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_: Any, folder: Path, **__: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL).write_bytes(b"nothing")
        Exported(precision="fp32", output="logits", classes=5, preprocessing=HOW).write(folder)

    monkeypatch.setattr("vitrail.export.writing.export_model", write)
    with pytest.raises(CheckpointError, match="cannot be run"):
        Predictor(toy("vit"), preprocessing=HOW, engine="onnx")


def test_8_bits_of_an_export_are_made_once(exported: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    about = Exported.from_json((exported("onnx") / CONFIG).read_text(), "here")
    place = kept_int8(exported("onnx"), about)
    assert Exported.from_json((place / CONFIG).read_text(), "here").precision == "int8"

    def again(*_: Any) -> None:
        pytest.fail("it was there")

    monkeypatch.setattr("vitrail.export.quantise.in_8_bits", again)
    assert kept_int8(exported("onnx"), about) == place
    assert kept_int8(exported("onnx") / MODEL, about) == place, "the file of the folder is the same file"
