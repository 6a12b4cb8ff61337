"""Damaged exports and caches: a one-line error, rebuilt, or without effect."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.toy_onnx_graphs import SIZE, write_graph_folder

from vitrail.base.errors import CheckpointError
from vitrail.base.files import get_cache_folder
from vitrail.export.atomic_folder import check_target_folder, remove_export, write_folder_atomically
from vitrail.export.description import CONFIG_FILE, ONNX_FILE, ExportDescription, is_exported
from vitrail.export.exported_model import ExportedModel
from vitrail.predict.engine_selection import EngineOptions, open_on_fastest_engine

PIXELS = np.random.default_rng(0).integers(0, 256, (2, *SIZE, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("outside", [False, True])
def test_flipped_bytes_are_detected_or_have_no_effect(tmp_path: Path, outside: bool, mutations: int) -> None:
    """20 flipped bits per file by default, one per hundred of --mutations."""
    folder = write_graph_folder(tmp_path / "a", outside=outside)
    engine, chance, found = ExportedModel(folder), random.Random(0), 0
    before = engine.run(PIXELS)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for _ in range(max(3, mutations // 100)):
            position = chance.randrange(len(content))
            path.write_bytes(
                content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]
            )
            try:
                damaged = ExportedModel(folder)
            except CheckpointError as error:
                found += is_line_about(folder, error)
            else:
                assert path.name == CONFIG_FILE
                assert (damaged.description, np.array_equal(damaged.run(PIXELS), before)) == (engine.description, True)
        path.write_bytes(content)
    assert found


def is_line_about(folder: Path, error: Exception) -> bool:
    assert str(folder) in str(error)
    assert "\n" not in str(error)
    return True


def test_config_has_checksums_of_the_files(tmp_path: Path) -> None:
    folder = write_graph_folder(tmp_path / "a", outside=True)
    about = json.loads((folder / CONFIG_FILE).read_text())
    assert set(about["files"]) == {ONNX_FILE, f"{ONNX_FILE}.data"}
    assert about["checksum"].startswith("sha256:")
    shutil.copy(write_graph_folder(tmp_path / "b", seed=1, outside=True) / f"{ONNX_FILE}.data", folder)
    with pytest.raises(CheckpointError, match=r'model.onnx.data does not match its checksum .*delete "files" and "che'):
        ExportedModel(folder)
    del about["files"], about["checksum"]
    (folder / CONFIG_FILE).write_text(json.dumps(about))
    np.testing.assert_array_equal(ExportedModel(folder).run(PIXELS), ExportedModel(tmp_path / "b").run(PIXELS))


def test_edited_description_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    folder = write_graph_folder(tmp_path / "a")
    about = {**json.loads((folder / CONFIG_FILE).read_text()), "labels": [*"vwxyz"]}
    (folder / CONFIG_FILE).write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r'config.json: .*if you edited it, delete its "checksum"'):
        ExportedModel(folder)
    del about["checksum"]
    (folder / CONFIG_FILE).write_text(json.dumps(about))
    assert ExportedModel(folder).description.labels == tuple("vwxyz")


def chosen(folder: Path) -> Any:
    found = open_on_fastest_engine(folder, EngineOptions(fast=True, threads=1), 1)
    return found.predictor.engine.run(PIXELS), found.predictor.engine.name, found.notes


def cached() -> list[Path]:
    return sorted((get_cache_folder() / "exports").iterdir())


def test_int8_is_cached_by_content_and_rebuilt_if_damaged(tmp_path: Path, mutations: int) -> None:
    """Another model of the same size, name and time is another model."""
    folder = tmp_path / "export"
    shutil.copytree(write_graph_folder(tmp_path / "a", seed=0), folder)
    os.utime(folder / ONNX_FILE, ns=(1, 1))
    first, name, notes = chosen(folder)
    assert name == "int8", notes
    size, before = (folder / ONNX_FILE).stat().st_size, cached()
    shutil.rmtree(folder)
    shutil.copytree(write_graph_folder(tmp_path / "b", seed=1), folder)
    os.utime(folder / ONNX_FILE, ns=(1, 1))
    second, name, _ = chosen(folder)
    assert ((folder / ONNX_FILE).stat().st_size, name) == (size, "int8")
    assert np.abs(second - first).max() > 1
    assert len(cached()) == len(before) + 1
    (own,) = set(cached()) - set(before)
    chance = random.Random(0)
    for path in sorted(own.iterdir()):
        for _ in range(max(2, mutations // 1000)):
            content = path.read_bytes()
            at = chance.randrange(len(content))
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
            again, name, notes = chosen(folder)
            assert (name, np.array_equal(again, second)) == ("int8", True), notes
    assert set(cached()) == {*before, own}


def test_other_files_are_not_replaced_or_deleted(tmp_path: Path) -> None:
    whole = write_graph_folder(tmp_path / "whole")
    for name in ("notes.txt", "README.md", "model.bin"):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        (folder / name).write_text("mine")
        with pytest.raises(CheckpointError, match=rf"holds '{name}', which is not part of an export"):
            check_target_folder(folder, overwrite=True)
        with pytest.raises(CheckpointError, match=rf"holds '{name}', which is not part of an export"):
            remove_export(folder)
        assert (folder / name).read_text() == "mine"
    for name in (ONNX_FILE, CONFIG_FILE):
        folder = tmp_path / f"with a link {name}"
        shutil.copytree(whole, folder)
        (folder / name).unlink()
        (folder / name).symlink_to(whole / name)
        with pytest.raises(CheckpointError, match="which is not part of an export"):
            check_target_folder(folder, overwrite=True)
    alone = tmp_path / "somebody's model"
    alone.mkdir()
    shutil.copy(whole / ONNX_FILE, alone)
    with pytest.raises(CheckpointError, match="is not an export, so it is not replaced"):
        check_target_folder(alone, overwrite=True)


def test_linked_folder_is_refused(tmp_path: Path) -> None:
    whole = write_graph_folder(tmp_path / "whole")
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    for name, target in (("a", whole), ("b", tmp_path / "nowhere"), ("c", tmp_path / "c")):
        link = tmp_path / name
        link.symlink_to(target)
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="is a symbolic link; expected a new folder"):
                check_target_folder(link, overwrite=overwrite)
        with pytest.raises(CheckpointError, match="is not a folder"):
            remove_export(link)
        with pytest.raises(CheckpointError), write_folder_atomically(link) as place:
            (place / ONNX_FILE).write_text("new")
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


@pytest.mark.parametrize("name", [CONFIG_FILE, ONNX_FILE, f"{ONNX_FILE}.data"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "large"])
def test_special_files_in_an_export_are_one_line_errors(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_graph_folder(tmp_path / "a", outside=True)
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(100 * 2**20 if name.endswith(".data") else 2**32)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    is_exported(folder)
    with pytest.raises(CheckpointError) as caught:
        ExportedModel(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_description_is_read_within_limits() -> None:
    with pytest.raises(CheckpointError, match="is not JSON: it has more than"):
        ExportDescription.from_json("[" + "1," * 2**18 + "1]", "here")


def test_export_that_appears_meanwhile_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    other = write_graph_folder(tmp_path / "other", seed=1)
    for overwrite in (False, True):
        folder = tmp_path / f"{overwrite}"

        def write(folder: Path = folder, overwrite: bool = overwrite) -> None:
            with write_folder_atomically(folder, overwrite=overwrite) as place:
                shutil.copytree(other, place, dirs_exist_ok=True)
                write_graph_folder(folder)

        if overwrite:
            write()
        else:
            with pytest.raises(CheckpointError, match="already exists; choose a new folder"):
                write()
        new = (folder / ONNX_FILE).read_bytes() == (other / ONNX_FILE).read_bytes()
        assert (new, set(os.listdir(folder))) == (overwrite, {ONNX_FILE, CONFIG_FILE})  # noqa: PTH208
    assert set(os.listdir(tmp_path)) == {"other", "False", "True"}  # noqa: PTH208
