"""Wrong calls that newcomers make: one line that says what to do, and exit code 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.toy_datasets import write_class_folders, write_image

Run = Callable[..., Any]


@pytest.mark.parametrize("command", ["predict", "embed -o f.npy", "explain"])
def test_a_missing_photo_is_the_same_in_every_command(
    vitrail_: Run, model: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    done = vitrail_(name, model, "missing.jpg", *options)
    assert (done.code, done.out.partition(",")[0]) == (2, "f.npy: 1 image" if name == "embed" else "")
    assert done.err.splitlines()[0] == "vitrail: 'missing.jpg' does not exist; expected an image"


@pytest.mark.parametrize("command", ["predict", "embed", "explain", "eval"])
@pytest.mark.parametrize("photo", ["cat.png", "example:cat"])
def test_a_photo_in_the_place_of_the_model(
    vitrail_: Run, model: Path, command: str, photo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "cat.png")
    done = vitrail_(command, photo, *([] if command == "eval" else [model]))
    message = f"vitrail: {photo} is an image. The model comes first, then the images\n"
    assert (done.code, done.out, done.err) == (2, "", message)


def test_one_class_is_one_line(vitrail_: Run, model: Path, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "photos", ants=4)
    done = vitrail_("train", "--data", tmp_path / "photos", "--init", model, "--batch", "2", "--dry-run")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("vitrail: photos has one class (ants); expected at least two")


@pytest.mark.parametrize("command", ["predict MODEL example:cat", "explain MODEL example:cat", "eval MODEL", "train"])
@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "gpu is not a device. Use cpu, cuda, cuda:1 or mps."), ("cuda:99", "Use --device cpu.")],
)
def test_a_wrong_device(vitrail_: Run, model: Path, command: str, device: str, message: str) -> None:
    done = vitrail_(*command.replace("MODEL", str(model)).split(), "--device", device)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"vitrail: --device {device} ")
    assert done.err.endswith(f"{message}\n")
    assert "opengl" not in done.err


def test_a_label_with_an_id_is_the_same_name_in_predict_and_explain(
    vitrail_: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.txt").write_text("".join(f"n0209828{n} terrier {n}, dog\n" for n in range(3)))
    words = (model, "example:cat", "--labels", "labels.txt")
    predicted = vitrail_("predict", *words, "--top", "1").out
    explained = vitrail_("explain", *words).out
    assert predicted.split("terrier ")[1][0] == explained.split("terrier ")[1][0]
    assert "n0209828" not in predicted + explained
