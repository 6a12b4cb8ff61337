"""Graphs that anybody may have written: one line that names the file, in bounded time; and files that change."""

import subprocess
import sys
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from support.toy_onnx_graphs import ADDED_TABLE, SIZE, random_matrix, write_graph_folder

from vitrail.base.errors import CheckpointError
from vitrail.data.images.image_items import ImageItem
from vitrail.export.description import ONNX_FILE
from vitrail.export.exported_model import ExportedModel
from vitrail.predict.engine_selection import EngineOptions, open_on_fastest_engine
from vitrail.predict.predictor import Predictor

PIXELS = np.random.default_rng(0).integers(0, 256, (3, *SIZE, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_a_good_graph_is_run(tmp_path: Path) -> None:
    found = ExportedModel(write_graph_folder(tmp_path / "a")).run(PIXELS)
    np.testing.assert_allclose(found, (PIXELS + ADDED_TABLE).mean((1, 2)) @ random_matrix(), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no rows", r"returned float32 of shape \(0, 5\) for 3 images; expected float32 of shape \(3, 5\)"),
        ("two rows", r"returned float32 of shape \(6, 5\) for 3 images; expected float32 of shape \(3, 5\)"),
        ("too wide", r"has .*; expected pixels|returned float32 of shape \(3, 10\)|cannot be run"),
        ("fails", r"failed: .*; export the model again"),
        ("loops", r"failed: it took longer than 0.6 s for 3 images"),
    ],
)
def test_a_graph_that_is_not_a_model_is_one_line(
    tmp_path: Path, kind: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.export.exported_model.TIMEOUT_SECONDS", 0.2)
    folder = write_graph_folder(tmp_path / "a", kind)
    with pytest.raises(CheckpointError, match=says) as caught:
        ExportedModel(folder).run(PIXELS)
    assert str(caught.value).startswith(str(folder / ONNX_FILE))
    assert "\n" not in str(caught.value)


def test_a_graph_that_loops_is_not_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.export.exported_model.TIMEOUT_SECONDS", 0.2)
    with pytest.raises(CheckpointError, match=r"took longer than 0\.2 s"):
        open_on_fastest_engine(write_graph_folder(tmp_path / "a", "loops"), EngineOptions(fast=True), 1)


def test_a_graph_that_takes_too_long_to_open_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose constants are computed from each other, which is done when it is opened."""
    opened = Event()

    def wait(*_: object, **__: object) -> None:
        opened.wait()

    monkeypatch.setattr("vitrail.export.onnx_session.TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr("vitrail.export.onnx_session.open_session", wait)
    folder = write_graph_folder(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"model\.onnx took longer than 0\.2 s to open; expected an export"):
        ExportedModel(folder)
    opened.set()


def test_an_image_without_finite_numbers_fails_and_the_others_do_not(tmp_path: Path) -> None:
    predictor = Predictor(write_graph_folder(tmp_path / "a", "NaN"))
    (row,) = predictor.iterate_results([ImageItem(PIXELS[0], "a.png")])
    assert row.values is None
    assert str(row.error).startswith("'a.png': the model returns NaN")


CHANGED = """
import os, sys, numpy as np
from pathlib import Path
from vitrail.export.exported_model import ExportedModel
for folder in map(Path, sys.argv[1:]):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    engine = ExportedModel(folder)
    before = engine.run(pixels)
    for path in folder.iterdir():
        size = path.stat().st_size
        os.truncate(path, 0)
        if "overwritten" in folder.name:
            path.write_bytes(bytes(size))
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(folder) not in maps.read_text(), "it is mapped"
    assert np.array_equal(engine.run(pixels), before), folder
"""


def test_files_that_change_do_not_change_an_opened_model(tmp_path: Path) -> None:
    """In a process of its own, which a mapped file would end."""
    folders = [
        write_graph_folder(tmp_path / f"{how} {outside}", outside=outside)
        for how in ("truncated", "overwritten")
        for outside in (False, True)
    ]
    assert [(folder / f"{ONNX_FILE}.data").exists() for folder in folders] == [False, True] * 2
    line = [sys.executable, "-c", CHANGED, *map(str, folders)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
