"""Cached teacher logits: equal to live ones, computed once, verified, and separate for each teacher."""

import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distillation import student
from test_teacher import SEEN, Convnet, teacher
from test_train_fit import PLAIN, data
from torch import Tensor

import vitrail.tasks.teacher_cache
from vitrail.base import locks
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import normalise
from vitrail.data.images.datasets import DatasetSplits, DatasetSubset
from vitrail.data.images.loader import evaluation_batches
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.classification import Classification, LossInputs
from vitrail.tasks.distillation import DistillationLoss, make_distillation
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.teacher import Teacher, TeacherView
from vitrail.tasks.teacher_cache import (
    LogitsFile,
    check_recorded_cache,
    open_intact_logits_or_none,
    write_array_with_checksum,
)
from vitrail.train.fit import fit


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.tasks.teacher_cache, "IMAGES_PER_FILE", 16)


def objective(folder: Path | None, which: Teacher | None = None, recipe: Recipe = PLAIN) -> Any:
    return make_loss(data(), which or teacher(), folder, recipe)


def make_loss(images: DatasetSplits, which: Teacher, folder: Path | None, recipe: Recipe = PLAIN) -> Any:
    given = student(dynamic=True)
    source = open_image_source(Classification(given), images, recipe, SEEN)
    return make_distillation(given, which, source, recipe, cache_folder=folder)[0].objective


def train_student(folder: Path | None) -> dict[str, Tensor]:
    loss = objective(folder)
    return fit(student(), data(), PLAIN, objective=loss, preprocessing=SEEN, device="cpu").model.state_dict()


def test_cached_logits_give_the_result_of_live_ones(tmp_path: Path) -> None:
    live, cached, again = train_student(None), train_student(tmp_path / "cache"), train_student(tmp_path / "cache")
    assert sorted(each.name for each in (tmp_path / "cache").glob("*/*.npy")) == [f"0000{n}.npy" for n in range(3)]
    for name, each in live.items():
        torch.testing.assert_close(cached[name], each, atol=1e-4, rtol=1e-3)
        assert torch.equal(cached[name], again[name])


def test_teacher_predicts_each_image_once(tmp_path: Path) -> None:
    net = Convnet()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2 + 40, "two images check the output"
    net.shown.clear()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2


def test_two_runs_with_an_empty_cache_share_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run would have replaced the files that the first one reads, which then stops."""
    computed, waiting, compute = list[int](), threading.Event(), vitrail.tasks.teacher_cache.compute_teacher_logits
    second = threading.Thread(target=objective, args=(tmp_path,))

    def compute_while_another_run_starts(view: Any, dataset: Any, rows: range, progress: Any) -> Any:
        computed.append(rows.start)
        if len(computed) == 1:
            second.start()
            assert waiting.wait(60)
        waiting.set()
        return compute(view, dataset, rows, progress)

    def say_that_it_waits(_: float) -> None:
        waiting.set()

    monkeypatch.setattr(vitrail.tasks.teacher_cache, "compute_teacher_logits", compute_while_another_run_starts)
    monkeypatch.setattr(locks, "sleep", say_that_it_waits)
    objective(tmp_path)
    second.join(60)
    assert sorted(computed) == [0, 16, 32]


def test_missing_and_damaged_files_are_recomputed(tmp_path: Path) -> None:
    objective(tmp_path)
    (folder,) = tmp_path.iterdir()
    before = [np.load(path) for path in sorted(folder.glob("*.npy"))]
    (folder / "00000.npy").unlink()
    for damage in (b"\x93NUMPY", b"", b"PK\x03\x04", b"text"):
        (folder / "00001.npy").write_bytes(damage)
        net = Convnet()
        with pytest.warns(match=r"00001\.npy is damaged \(.*\); the teacher predicts these images again"):
            objective(tmp_path, teacher(net))
        assert sum(map(len, net.shown)) == 2 + (32 if damage == b"\x93NUMPY" else 16)
    for path, array in zip(sorted(folder.glob("*.npy")), before, strict=True):
        assert np.array_equal(np.load(path), array)
    assert not [each for each in folder.iterdir() if each.name.startswith(".")]


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_file_with_a_flipped_bit_is_recomputed(tmp_path: Path, mutations: int) -> None:
    write_array_with_checksum(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
    rows, content, chance = np.load(tmp_path / "a.npy"), (tmp_path / "a.npy").read_bytes(), random.Random(0)
    recomputed = 0
    for _ in range(max(mutations // 10, 100)):
        position = chance.randrange(len(content))
        changed = bytes([content[position] ^ (1 << chance.randrange(8))])
        (tmp_path / "a.npy").write_bytes(content[:position] + changed + content[position + 1 :])
        found = open_intact_logits_or_none(tmp_path / "a.npy", (16, 4))
        recomputed += found is None
        assert found is None or np.array_equal([found.read_row(row) for row in range(16)], rows)
    assert recomputed
    (tmp_path / "a.npy").write_bytes(content[:-72])
    old = open_intact_logits_or_none(tmp_path / "a.npy", (16, 4))
    assert old is not None, "a file of an earlier version, without checksum"
    assert np.array_equal([old.read_row(row) for row in range(16)], rows)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_special_file_is_a_one_line_error(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a.npy")
    with pytest.raises(CheckpointError, match=r"a\.npy cannot be used: it is a "):
        open_intact_logits_or_none(tmp_path / "a.npy", (16, 4))


def test_a_folder_that_only_a_file_names_is_not_written_to(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (None, run / "cache"):
        check_recorded_cache(None if folder is None else str(folder), run)
    for given in (str(elsewhere), str(run / ".." / "elsewhere"), "a\0b"):
        with pytest.raises(
            CheckpointError, match="for a teacher's logits, which has none; expected a folder in the run"
        ):
            check_recorded_cache(given, run)
    objective(elsewhere)
    check_recorded_cache(str(elsewhere), run)


def test_missing_logits_are_an_error(tmp_path: Path) -> None:
    """The image was unreadable when the cache was written."""
    objective(tmp_path)
    (folder,) = tmp_path.iterdir()
    np.save(folder / "00000.npy", np.full((16, 4), np.nan, np.float32))
    loss = objective(tmp_path)
    with pytest.raises(CheckpointError, match="lacks logits of some images; delete the folder"):
        fit(student(), data(), PLAIN, objective=loss, preprocessing=SEEN, device="cpu")


def test_each_teacher_and_data_set_has_its_own_folder(tmp_path: Path) -> None:
    """Another teacher, other images under the same names, or another order of the images."""
    splits = data()
    assert isinstance(splits.train, ArrayDataset)
    other = replace(
        splits,
        train=ArrayDataset(255 - splits.train.images, splits.train.labels, splits.classes, splits.train.dataset_name),
    )
    reversed_order = replace(splits, train=DatasetSubset(splits.train, range(39, -1, -1)))
    moved = Convnet()
    moved.head.bias.data[0] += 1
    for number, (which, images) in enumerate(
        [(None, splits), (moved, splits), (None, other), (None, reversed_order)], 1
    ):
        loss = make_loss(images, teacher(which), tmp_path)
        assert len(list(tmp_path.iterdir())) == number
        assert isinstance(loss, DistillationLoss)
        view = TeacherView(teacher(which), images, SEEN, torch.device("cpu"))
        assert images.train is not None
        (batch,) = evaluation_batches(images.train, SEEN)
        inputs = LossInputs(normalise(batch["images"], SEEN), torch.empty(0), batch["labels"], batch["indices"])
        torch.testing.assert_close(loss.teacher_logits(inputs), view(inputs.images))


@pytest.mark.parametrize(
    "moving", [{"flip": 0.5}, {"mixup": 0.1}, {"crop": "shift"}, {"policy": "rand"}, {"early_size": 8}, {"erase": 0.1}]
)
def test_cache_with_random_augmentation_is_refused(moving: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(moving))
    with pytest.raises(ConfigError, match=rf"random augmentation \({name}\).*; expected .*`{name}` "):
        objective(tmp_path / "cache", recipe=PLAIN.with_settings(moving))
    assert not (tmp_path / "cache").exists()


def test_file_that_changes_during_a_run_is_an_error(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    path = tmp_path / "a.npy"

    def open_file() -> LogitsFile:
        write_array_with_checksum(path, rows)
        found = open_intact_logits_or_none(path, (16, 4))
        assert found is not None
        assert np.array_equal(found.read_row(15), rows[15])
        return found

    file = open_file()
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match="changed during the run"):
        file.read_row(15)
    file, other = open_file(), bytearray(path.read_bytes())
    other[-100] ^= 1
    os.utime(path, ns=(0, 0))
    path.write_bytes(other)
    with pytest.raises(CheckpointError, match="changed during the run"):
        file.read_row(0)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        file.read_row(0)
