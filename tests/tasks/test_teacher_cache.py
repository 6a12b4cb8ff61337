"""Cached teacher logits: equal to live ones, computed once, verified, and separate for each teacher."""

import resource
import threading
from dataclasses import replace
from pathlib import Path
from time import sleep
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
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.datasets import DatasetSplits, DatasetSubset
from vitrail.data.images.loader import evaluation_batches
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.classification import Classification, LossInputs
from vitrail.tasks.distillation import DistillationLoss, make_distillation
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.teacher import Teacher, TeacherView
from vitrail.tasks.teacher_cache import TeacherCache, check_recorded_cache
from vitrail.train.fit import fit


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.tasks.teacher_cache, "IMAGES_PER_BLOCK", 16)


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
    assert sorted(each.name for each in (tmp_path / "cache").glob("*/*")) == ["logits.npy", "teacher.json"]
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


def test_two_runs_with_an_empty_cache_share_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, waiting, compute = list[int](), threading.Event(), vitrail.tasks.teacher_cache.compute_teacher_logits
    second = threading.Thread(target=objective, args=(tmp_path,))

    def compute_while_another_run_starts(file: Any, view: Any, images: Any, indices: Any, progress: Any) -> None:
        computed.extend(indices.tolist())
        if second.ident is None:  # not started
            second.start()
            waiting.wait()
        waiting.set()
        compute(file, view, images, indices, progress)

    def say_that_it_waits(_: float) -> None:
        waiting.set()
        sleep(0.01)  # without it, this thread keeps the interpreter from the one that computes

    monkeypatch.setattr(vitrail.tasks.teacher_cache, "compute_teacher_logits", compute_while_another_run_starts)
    monkeypatch.setattr(locks, "sleep", say_that_it_waits)
    objective(tmp_path)
    second.join()
    assert sorted(computed) == [*range(40)]


def test_missing_and_damaged_rows_are_recomputed(tmp_path: Path) -> None:
    objective(tmp_path)
    (path,) = tmp_path.glob("*/logits.npy")
    before, content = np.load(path), path.read_bytes()
    changed = bytearray(content)
    changed[128 + 4 * 4 * 20] ^= 1
    for damage, rows in ((bytes(changed), 1), (content[:300], 40), (b"", 40), (b"PK\x03\x04", 40), (b"text", 40)):
        path.write_bytes(damage)
        net = Convnet()
        with pytest.warns(
            match=rf"logits\.npy is damaged \({rows} of 40 rows\); the teacher predicts these images again"
        ):
            objective(tmp_path, teacher(net))
        assert sum(map(len, net.shown)) == 2 + rows
        np.testing.assert_allclose(np.load(path), before, atol=1e-5)
    path.unlink()
    net = Convnet()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2 + 40
    assert path.read_bytes() == content
    assert not [each for each in path.parent.iterdir() if each.name.startswith(".")]


def test_an_interrupted_computation_continues_where_it_was(tmp_path: Path) -> None:
    def interrupt(net: Any, _: object) -> None:
        if len(net.shown) == 3:
            raise KeyboardInterrupt

    net = Convnet()
    net.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        objective(tmp_path, teacher(net))
    net = Convnet()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2 + 8, "two blocks of 16 were complete"


def test_files_of_an_earlier_version_are_not_used(tmp_path: Path) -> None:
    objective(tmp_path)
    (folder,) = tmp_path.iterdir()
    for number in range(3):
        np.save(folder / f"{number:05}.npy", np.zeros((16, 4), np.float32))
    objective(tmp_path)
    (folder / "logits.npy").unlink()
    with pytest.warns(match="has logits of an earlier version") as noted:
        objective(tmp_path)
    assert len(noted) == 1
    assert np.load(folder / "logits.npy").any()


@pytest.mark.parametrize("limit", [0, 128 + 4 * 40 * 4 + 4 * 20])
def test_on_a_full_disk_the_teacher_runs_at_every_step(limit: int, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    live, before = objective(None), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.warns(match="the teacher's logits are not cached: cannot write .*; it runs at every step"):
            found = objective(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not isinstance(found.teacher_logits, TeacherCache)
    (batch,) = evaluation_batches(get_training_images(), SEEN)
    inputs = LossInputs(normalize(batch["images"], SEEN), torch.empty(0), batch["labels"], batch["indices"])
    assert torch.equal(found.teacher_logits(inputs), live.teacher_logits(inputs))


def get_training_images() -> ArrayDataset:
    images = data().train
    assert isinstance(images, ArrayDataset)
    return images


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
    loss = objective(tmp_path)
    loss.teacher_logits.file.valid[7] = False
    with pytest.raises(CheckpointError, match=r"lacks logits of some images, .*; resume the run"):
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
        inputs = LossInputs(normalize(batch["images"], SEEN), torch.empty(0), batch["labels"], batch["indices"])
        torch.testing.assert_close(loss.teacher_logits(inputs), view(inputs.images))


@pytest.mark.parametrize(
    "moving", [{"flip": 0.5}, {"mixup": 0.1}, {"crop": "shift"}, {"policy": "rand"}, {"early_size": 8}, {"erase": 0.1}]
)
def test_cache_with_random_augmentation_is_refused(moving: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(moving))
    with pytest.raises(ConfigError, match=rf"random augmentation \({name}\).*; expected .*`{name}` "):
        objective(tmp_path / "cache", recipe=PLAIN.with_settings(moving))
    assert not (tmp_path / "cache").exists()
