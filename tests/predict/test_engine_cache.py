"""The cache of speeds and exports, which is optional."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.command_processes import PROCESSES, wait_for_exit
from support.toy_exports import (
    LABELS,
    PREPROCESSING,
    ExportFinder,
    make_toy_model,
    random_pixels,
    reference_probabilities,
    softmax_rows,
)
from support.toy_onnx_graphs import write_graph_folder

from vitrail.base.errors import CheckpointError
from vitrail.base.files import get_cache_folder
from vitrail.base.locks import wait_for_entry_lock
from vitrail.export.atomic_folder import write_folder_atomically
from vitrail.export.description import CONFIG_FILE, ONNX_FILE, ExportDescription
from vitrail.export.exported_model import ExportedModel
from vitrail.opening import Opened, open_torch_model
from vitrail.predict import engine_cache
from vitrail.predict.engine_cache import (
    export_cache_path,
    open_cached_int8_export,
    open_or_write_export,
    read_engine_speeds,
    speed_file_path,
    write_engine_speeds,
)
from vitrail.predict.predictor import Predictor

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier, Event


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_measured_speeds_are_cached(home: Path) -> None:
    assert read_engine_speeds("a") is None
    write_engine_speeds("a", {"x": 1})
    write_engine_speeds("b", {"y": [2]})
    assert (read_engine_speeds("a"), read_engine_speeds("b"), read_engine_speeds("c")) == ({"x": 1}, {"y": [2]}, None)
    write_engine_speeds("a", {"x": 3})
    assert read_engine_speeds("a") == {"x": 3}
    assert sorted((get_cache_folder() / "engines").iterdir()) == sorted(map(speed_file_path, "ab")), "one file per key"
    assert get_cache_folder() == home / ".cache" / "vitrail"


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"a"', "\x00", "[" * 100_000, '{"a": 5}', '{"a": [1]}'])
def test_invalid_cache_file_is_ignored(text: str) -> None:
    speed_file_path("a").parent.mkdir(parents=True)
    speed_file_path("a").write_text(text)
    assert read_engine_speeds("a") is None
    write_engine_speeds("a", {"x": 1})
    assert read_engine_speeds("a") == {"x": 1}


def test_speeds_of_another_key_or_with_a_flipped_bit_are_measured_again() -> None:
    write_engine_speeds("a", {"x": 1})
    text = speed_file_path("a").read_bytes()
    speed_file_path("b").write_bytes(text)
    assert read_engine_speeds("b") is None, "the file of another key"
    for place in range(len(text)):
        speed_file_path("a").write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        assert read_engine_speeds("a") in (None, {"x": 1}), place
    speed_file_path("a").write_text('{"key": "a", "measured": {"x": 1}}')
    assert read_engine_speeds("a") is None, "without a checksum it is not ours"


def test_bytes_that_are_no_text_are_survived() -> None:
    speed_file_path("a").parent.mkdir(parents=True)
    speed_file_path("a").write_bytes(b"\xff\xfe\x00{")
    assert read_engine_speeds("a") is None
    write_engine_speeds("a", {"x": 1})
    assert read_engine_speeds("a") == {"x": 1}


def test_unwritable_cache_is_ignored(home: Path) -> None:
    home.write_text("a file where a folder should be")
    write_engine_speeds("a", {"x": 1})
    assert read_engine_speeds("a") is None
    home.unlink()
    speed_file_path("a").mkdir(parents=True)
    write_engine_speeds("a", {"x": 1})
    assert read_engine_speeds("a") is None
    assert list((get_cache_folder() / "engines").iterdir()) == [speed_file_path("a")], "nothing is left lying about"


def test_nobodys_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    write_engine_speeds("a", {"x": 1})
    assert read_engine_speeds("a") is None
    with pytest.raises(CheckpointError, match=r"Could not determine home directory.*set HOME"):
        get_cache_folder()


def toy(name: str = "vit", **fields: Any) -> Opened:
    return open_torch_model(make_toy_model(name, **fields), preprocessing=PREPROCESSING, labels=LABELS)


def test_export_key_depends_on_all_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    first = export_cache_path(toy(), "logits", merge=0, precision="fp32")
    assert first == export_cache_path(toy(), "logits", merge=0, precision="fp32")
    assert first.parent == get_cache_folder() / "exports"
    moved = toy()
    moved.module.get_parameter("head.bias").data += 1
    other = open_torch_model(make_toy_model("vit"), preprocessing=PREPROCESSING.with_fields({"crop": 0.9}))
    places = {
        first,
        export_cache_path(toy(), "class", merge=0, precision="fp32"),
        export_cache_path(toy(), "logits", merge=1, precision="fp32"),
        export_cache_path(toy(), "logits", merge=0, precision="int8"),
        export_cache_path(toy("vit any size"), "logits", merge=0, precision="fp32"),
        export_cache_path(toy(activation="gelu_tanh"), "logits", merge=0, precision="fp32"),
        export_cache_path(moved, "logits", merge=0, precision="fp32"),
        export_cache_path(other, "logits", merge=0, precision="fp32"),
    }
    monkeypatch.setattr("vitrail.predict.engine_cache.__version__", "9.9.9")
    places.add(export_cache_path(toy(), "logits", merge=0, precision="fp32"))
    assert len(places) == 9


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, exported: ExportFinder) -> list[Path]:
    """The folders that were written, in the time of a copy."""
    found = list[Path]()

    def write(_: Any, folder: Path, *, to: str, **__: Any) -> None:
        found.append(folder)
        shutil.copytree(exported("onnx" if to == "onnx" else "int8"), folder, dirs_exist_ok=True)

    monkeypatch.setattr("vitrail.export.export.export_model", write)
    return found


def test_export_is_written_once(written: list[Path]) -> None:
    pixels = random_pixels()
    for _ in range(2):
        predictor = Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, labels=[*"abcde"], engine="onnx")
        assert (
            np.abs(
                softmax_rows(predictor.engine.run(pixels)) - reference_probabilities(make_toy_model("vit"), pixels)
            ).max()
            < 1e-5
        )
        assert predictor.labels == tuple("abcde")
        assert predictor.engine.name == "onnx"
    assert len(written) == 1
    assert Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, engine="int8").engine.name == "int8"
    assert len(written) == 2


def cut_off(folder: Path) -> None:
    (folder / ONNX_FILE).write_bytes((folder / ONNX_FILE).read_bytes()[:3000])


def emptied(folder: Path) -> None:
    (folder / ONNX_FILE).write_bytes(b"")


def without_model(folder: Path) -> None:
    (folder / ONNX_FILE).unlink()


def without_config(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()


def without_words(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("{")


def of_another_format(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text((folder / CONFIG_FILE).read_text().replace('"format": 1', '"format": 0'))


@pytest.mark.parametrize("damage", [cut_off, emptied, without_model, without_config, without_words, of_another_format])
def test_one_that_was_damaged_is_written_again(damage: Callable[[Path], None], written: list[Path]) -> None:
    Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, engine="onnx")
    (place,) = written
    damage(place)
    predictor = Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, engine="onnx")
    assert len(written) == 2
    assert predictor.engine.run(random_pixels()).shape == (3, 5)
    assert json.loads((place / CONFIG_FILE).read_text())["format"] == 1


def test_one_that_stays_damaged_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_: Any, folder: Path, **__: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ONNX_FILE).write_bytes(b"nothing")
        ExportDescription(precision="fp32", output="logits", classes=5, preprocessing=PREPROCESSING).write(folder)

    monkeypatch.setattr("vitrail.export.export.export_model", write)
    with pytest.raises(CheckpointError, match="cannot be run"):
        Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, engine="onnx")


def test_8_bits_of_an_export_are_made_once(exported: ExportFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_cached_int8_export(ExportedModel(exported("onnx")), Path)
    assert ExportDescription.from_json((place / CONFIG_FILE).read_text(), "here").precision == "int8"

    def again(*_: Any) -> None:
        pytest.fail("it was there")

    monkeypatch.setattr("vitrail.export.quantize.write_int8_export", again)
    assert open_cached_int8_export(ExportedModel(exported("onnx")), Path) == place


def open_when_all_have_found_it_missing(path: Path, export: Path, barrier: "Barrier", seen: Path) -> None:
    """What each of several processes does with an empty cache."""
    find = engine_cache.is_complete_export

    def find_together(path: Path, *, verify: bool = False) -> bool:
        found = find(path, verify=verify)
        if not verify:
            barrier.wait()
        return found

    def write(path: Path) -> None:
        with seen.open("a") as file:
            file.write("written\n")
        with write_folder_atomically(path) as place:
            shutil.copytree(export, place, dirs_exist_ok=True)

    engine_cache.is_complete_export = find_together
    opened = open_or_write_export(path, write, ExportedModel)
    barrier.wait()  # all of them have opened it
    assert opened.with_threads(1, 2).run(np.zeros((1, 8, 8, 3), np.uint8)).shape == (1, 5)
    with seen.open("a") as file:
        file.write("opened\n")


def test_processes_that_find_an_empty_cache_share_one_export(tmp_path: Path) -> None:
    """Each would have written its own, and replaced the one that another process uses."""
    export, barrier = write_graph_folder(tmp_path / "export"), PROCESSES.Barrier(4)
    arguments = (get_cache_folder() / "exports" / "a", export, barrier, tmp_path / "seen")
    processes = [PROCESSES.Process(target=open_when_all_have_found_it_missing, args=arguments) for _ in range(4)]
    for each in processes:
        each.start()
    assert [wait_for_exit(each) for each in processes] == [0] * 4
    assert sorted((tmp_path / "seen").read_text().split()) == ["opened"] * 4 + ["written"]
    assert [each.name for each in arguments[0].parent.iterdir()] == ["a"], "no lock file is left"


def test_an_intact_export_is_never_replaced(tmp_path: Path) -> None:
    """Opening may fail for another reason, such as too little memory."""
    place = write_graph_folder(get_cache_folder() / "exports" / "a")
    before = [path.stat() for path in sorted(place.iterdir())]

    def open_export(_: Path) -> None:
        raise CheckpointError("it took longer than 60 s to open")

    with pytest.raises(CheckpointError, match="longer than 60 s"):
        open_or_write_export(place, lambda _: pytest.fail("it was intact"), open_export)
    assert [path.stat() for path in sorted(place.iterdir())] == before


def test_unfinished_exports_of_killed_processes_are_removed(written: list[Path]) -> None:
    """A folder of an entry that a live process writes stays, and so does everything with another name."""
    place = get_cache_folder() / "exports"
    names = (f".{'a' * 32}.abcd_123", f".{'b' * 32}.abcd_123", ".other.abcd_123", "c" * 32)
    for name in names:
        (place / name).mkdir(parents=True)
        (place / name / "model.onnx").write_text("part")
    live = PROCESSES.Process(target=hold_entry_lock, args=(place / ("b" * 32), ready := PROCESSES.Event()))
    live.start()
    try:
        assert ready.wait(60)
        Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, engine="onnx")
    finally:
        live.kill()
        live.join()
    assert {name for name in names if (place / name).exists()} == {*names[1:]}
    assert len(written) == 1


def hold_entry_lock(path: Path, ready: "Event") -> None:
    with wait_for_entry_lock(path):
        ready.set()
        sleep(600)
