"""Missing, unreadable and non-image files and empty folders: the same exit code and wording in every command."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile_images import blank_tiff
from support.toy_datasets import write_class_folders

Run = Callable[..., Any]
TRAIN = (
    *("train", "--model", "ViT-Ti/16", "--set", "depth=1", "--set", "width=16", "--set", "heads=2", "--epochs", 1),
    *("--set", "patch_size=8", "--image-size", 16, "--batch", 4, "--strict", "-o", "run", "--data"),
)
REASONS = {  # kind of input → reason in the error
    "missing": "does not exist; expected ",
    "truncated": "cannot be read: ",
    "text": "is not an image; expected JPEG, PNG",
    "empty": "has no images; expected ",
}


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of two classes in photos/; arguments for the commands are next to it."""
    monkeypatch.chdir(tmp_path)
    photos = write_class_folders(tmp_path / "photos", a=4, b=4)
    (tmp_path / "truncated.png").write_bytes((photos / "a" / "0.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("command", ["predict", "embed", "explain", "export --check", "look", "report", "train"])
def test_exit_code_and_wording(vitrail_: Run, model: Path, given: Path, command: str, fault: str) -> None:
    image = {"missing": "missing.png", "empty": "empty"}.get(fault, f"{fault}.png")
    if command == "train":
        if fault in ("truncated", "text"):  # one of the images of a class
            bad = given / "photos" / "a" / "0.png"
            bad.write_bytes((given / image).read_bytes())
            result = vitrail_(*TRAIN, "photos")
        else:
            result = vitrail_(*TRAIN, image)
    elif command in ("look", "report"):
        result = vitrail_(command, model, "--data", image, "-o", "out.html")
    elif command == "export --check":
        result = vitrail_("export", model, "out", "--check", image)
    else:
        result = vitrail_(command, model, image, *(("-o", "out.npy") if command == "embed" else ()))
    lines = [line for line in result.err.splitlines() if not line.startswith(("vitrail: note", "vitrail: warning"))]
    assert result.code == 2, result
    assert re.search(REASONS[fault], lines[0]), result.err
    assert len(lines) == (2 if command == "embed" and fault != "empty" else 1), result.err


def test_damaged_tags_of_a_photo_are_not_reported_in_words_of_pillow(
    vitrail_: Run, model: Path, tmp_path: Path
) -> None:
    """Its description is cut: a description is not needed, but Pillow's table of tags ends there, too."""
    photo = tmp_path / "cut.tif"
    photo.write_bytes(blank_tiff(30, 30, tags={270: (2, [65] * 40)})[:-20])
    result = vitrail_("predict", model, photo)
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert "cut.tif' cannot be read: " in result.err


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (("predict", "model", "tekst.png"), "text.png"),
        (("explain", "model", "photos/a/0.pgn"), "photos/a/0.png"),
        (("eval", "model", "--data", "photo"), "photos"),
        (("train", "--data", "./phtos"), "./photos"),
        (("train", "--data", "fotos", "--task", "caption"), "photos"),
        (("predict", "./modell", "text.png"), "./model"),
        (("train", "--data", "photos", "--init", "photos/b/0.npg"), "photos/b/0.png"),
        (("distill", "--data", "photos", "--teacher", "./mode", "--batch", "4"), "./model"),
        (("predict", "model", "text.png", "--labels", "label.txt"), "labels.txt"),
    ],
)
def test_the_nearest_file_is_suggested(
    vitrail_: Run, model: Path, given: Path, words: tuple[str, ...], suggested: str
) -> None:
    """What is missing is an error, whatever it could also be."""
    if model != given / "model":
        (given / "model").symlink_to(model)
    (given / "labels.txt").write_text("a\n")
    result = vitrail_(*words)
    assert (result.code, len(result.err.splitlines())) == (2, 1), result
    assert result.err.endswith(f"did you mean '{suggested}'?\n"), result.err


@pytest.mark.parametrize("command", ["predict", "embed", "explain"])
def test_some_unreadable_images_are_named_and_the_others_processed(
    vitrail_: Run, model: Path, given: Path, command: str
) -> None:
    out = {"predict": "out.csv", "embed": "out.npy", "explain": "out"}[command]
    result = vitrail_(command, model, "missing.png", "photos", "text.png", "empty", "-o", out)
    lines = [line for line in result.err.splitlines() if not line.startswith("vitrail: note")]
    assert result.code == 2
    assert lines[0].startswith("vitrail: 'empty' has no images; expected")
    assert [line.split("'")[1] for line in lines[1:3]] == ["missing.png", "text.png"]
    assert lines[3:] == [
        f"vitrail: 2 of 10 images and 1 of the arguments could not be read; the results of the others are in {out}"
    ]
