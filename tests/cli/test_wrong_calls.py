"""Wrong calls that newcomers make: one line that says what to do, and exit code 2."""

import subprocess
import sys
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


MISTYPED = {
    **dict.fromkeys(("predict modle.pth a.jpg", "eval modle.pth", "summary modle.pth", "bench modle.pth"), "model.pth"),
    **dict.fromkeys(("train --init modle.pth", "distill --teacher modle.pth", "probe modle.pth"), "model.pth"),
    **dict.fromkeys(
        ("convert modle.pth out --to timm", "export modle.pth out", "explain modle.pth a.jpg"), "model.pth"
    ),
    **dict.fromkeys(("train --data phtoos", "pretrain mae --data phtoos", "eval vit_fashion --data phtoos"), "photos"),
    **dict.fromkeys(("train --resume runs/photso-1", "translate runs/photso-1 Hallo"), "runs/photos-1"),
    "train --model vit_tinny": "vit_tiny_patch16_224",
}
PROGRAM = """
import sys
from vitrail.cli import main

for words in sys.argv[1:]:
    sys.argv = ["vitrail", *words.split()]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
assert "torch" not in sys.modules
"""


def test_a_mistyped_path_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model.pth").touch()
    for folder in ("photos", "runs/photos-1"):
        (tmp_path / folder).mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MISTYPED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert [line.rpartition(" did you mean ")[2] for line in lines] == [f"{each!r}?" for each in MISTYPED.values()]


def test_short_names_of_dtypes(vitrail_: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert vitrail_("convert", model, "half", "--to", "vitrail", "--dtype", "fp16").code == 0
    done = vitrail_("train", "--precision", "bf61")
    assert done.err == "vitrail: --precision 'bf61' is not one of auto, float32, bfloat16, float16.\n"
    from vitrail.recipes.recipe import Recipe

    for short, precision in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        assert Recipe().with_settings({"precision": short}).loop.precision == precision
        assert vitrail_("train", "--precision", short, "--dry-run", "--set", "depth=0").code == 2
