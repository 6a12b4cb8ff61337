"""Answers kept on disk: the same as live ones, asked once, whole or not at all, and never another teacher's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distill import student
from test_teacher import KNOWN, SEEN, Convnet, teacher
from test_train_fit import PLAIN, data
from torch import Tensor

import vitrail.train.kept_answers
from vitrail.errors import CheckpointError, ConfigError
from vitrail.train.distill import distilling
from vitrail.train.fit import fit
from vitrail.train.recipe import Recipe
from vitrail.train.teacher import Teacher


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.train.kept_answers, "KEPT", 16)


def objective(folder: Path | None, which: Teacher | None = None, recipe: Recipe = PLAIN) -> Any:
    return distilling(which or teacher(), student(), data(), recipe, SEEN, torch.device("cpu"), kept=folder)[0]


def trained(folder: Path | None) -> dict[str, Tensor]:
    made = objective(folder)
    return fit(student(), data(), PLAIN, objective=made, preprocessing=SEEN, device="cpu").model.state_dict()


def test_the_same_as_live(tmp_path: Path) -> None:
    live, kept, again = trained(None), trained(tmp_path / "kept"), trained(tmp_path / "kept")
    assert sorted(each.name for each in (tmp_path / "kept").glob("*.npy")) == [f"0000{n}.npy" for n in range(3)]
    for name, each in live.items():
        torch.testing.assert_close(kept[name], each, atol=1e-4, rtol=1e-3)
        assert torch.equal(kept[name], again[name])


def test_each_picture_is_asked_once(tmp_path: Path) -> None:
    net = Convnet()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2 + 40, "two to see whether it answers"
    net.shown.clear()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2


def test_what_is_missing_or_damaged_is_asked_again(tmp_path: Path) -> None:
    objective(tmp_path)
    before = [np.load(path) for path in sorted(tmp_path.glob("*.npy"))]
    (tmp_path / "00000.npy").unlink()
    (tmp_path / "00001.npy").write_bytes(b"\x93NUMPY")
    net = Convnet()
    objective(tmp_path, teacher(net))
    assert sum(map(len, net.shown)) == 2 + 32
    for path, array in zip(sorted(tmp_path.glob("*.npy")), before, strict=True):
        assert np.array_equal(np.load(path), array)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_answers_of_another_are_refused(tmp_path: Path) -> None:
    objective(tmp_path)
    with pytest.raises(
        ConfigError, match="keeps the answers of the teacher to colours, with another teacher; expected"
    ):
        objective(tmp_path, teacher(how=SEEN))
    (tmp_path / "teacher.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"teacher.json cannot be read: .*; expected kept answers, or an empty"):
        objective(tmp_path)


@pytest.mark.parametrize(
    "moving", [{"flip": 0.5}, {"mixup": 0.1}, {"crop": "shift"}, {"policy": "rand"}, {"early_size": 8}, {"erase": 0.1}]
)
def test_only_for_pictures_that_stay_the_same(moving: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(moving))
    with pytest.raises(
        ConfigError, match=rf"look different each time \({name}\); expected .*--{name.replace('_', '-')} "
    ):
        objective(tmp_path / "kept", recipe=PLAIN.changed(moving))
    assert not (tmp_path / "kept").exists()
    assert KNOWN != SEEN
