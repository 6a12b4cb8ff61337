"""vitrail compare, and vitrail eval of one head, on the command line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.noisy_weights import add_weight_noise
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.cli import build_app


def run(*words: object) -> None:
    build_app()([str(word) for word in words], exit_on_error=False, print_error=False, result_action="return_value")


def save_model(folder: Path, labels: list[str] | None, preset: str = "vit_tiny_patch16_224", **fields: Any) -> Path:
    fields = {"image_size": 32, "classes": 2, "depth": 1, "width": 16, "heads": 2, **fields}
    model = add_weight_noise(vitrail.create(preset, **fields), std=0.3)
    vitrail.save(model, folder, labels=labels, preprocessing=vitrail.Preprocessing(image_size=32))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "photos", ants=8, bees=8)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return save_model(tmp_path / "teacher", ["bees", "ants"])


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return save_model(tmp_path / "student", ["ants", "bees"], "deit_tiny_distilled_patch16_224", depth=2)


def test_report(photos: Path, teacher: Path, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    run("compare", teacher, student, "--data", photos, "--batch", 5)
    seen = capsys.readouterr()
    assert seen.out.startswith("photos, 16 images: accuracy and disagreement in %\n")
    assert "\n1  teacher " in seen.out
    assert "\n4  student, both heads " in seen.out
    assert "\nteacher – student, class head " in seen.out
    assert "\nembedding " in seen.out
    assert "\nblock 2 " in seen.out
    assert seen.err == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_table_in_a_file(photos: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("compare", teacher, "--data", photos, "--out", tmp_path / "table.csv")
    assert capsys.readouterr().out.endswith(f"\n\nwritten: {tmp_path / 'table.csv'}\n")
    heading, truth, model = (tmp_path / "table.csv").read_text("utf-8").splitlines()
    assert heading == "#,voter,correct,0,1"
    assert truth.startswith("0,ground truth,1.0,0.0,")
    assert model.startswith("1,teacher,")


def test_json_matches_eval(photos: Path, teacher: Path, student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("compare", teacher, student, "--data", photos, "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["models"] == [str(teacher), str(student)]
    eval_arguments = [(teacher,), *((student, "--head", head) for head in ("class", "distill", "both"))]
    for words, voter in zip(eval_arguments, data["voters"][1:], strict=True):
        run("eval", *words, "--data", photos, "--json")
        assert json.loads(capsys.readouterr().out)["top1"] == voter["accuracy"]
    assert len({each["accuracy"] for each in data["voters"]}) > 2, "the test can fail"


def test_results_are_written_to_a_folder(
    photos: Path, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    out = tmp_path / "new" / "results"
    run("compare", student, "--data", photos, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["comparison.json", "comparison.png"]
    assert f"\nwritten: {out / 'comparison.json'}, {out / 'comparison.png'}\n" in capsys.readouterr().out
    run("compare", student, "--data", photos, "--json")
    printed, written = json.loads(capsys.readouterr().out), json.loads((out / "comparison.json").read_text("utf-8"))
    assert {**printed, "seconds": 0} == {**written, "seconds": 0}


def test_output_folder_is_checked_first(
    photos: Path, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VitrailError, match=r"^cannot make the folder "):
        run("compare", student, "--data", photos, "--out", tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib$"):
        run("compare", student, "--data", photos, "--out", tmp_path / "results")
    assert capsys.readouterr().out == ""


def test_runs_are_compared_on_held_out_images(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        save_model(tmp_path / name / "model", ["ants", "bees"])
        plan = {"request": {"data": str(photos), "val_share": 0.5}, "recipe": {"name": "probe", "seed": seed}}
        (tmp_path / name / "run.json").write_text(json.dumps(plan))
    run("compare", tmp_path / "one", tmp_path / "two", "--json")
    seen = capsys.readouterr()
    assert json.loads(seen.out)["images"] == 8
    assert seen.err == "vitrail: note: photos: 8 of 16 images held out for validation, by seed 3\n"
    run("compare", tmp_path / "one", tmp_path / "three", "--data", photos)
    seen = capsys.readouterr()
    assert seen.err.splitlines()[1].endswith("three: held out other images, and was trained on some of these")
    run("compare", tmp_path / "one" / "model", "--data", photos, "--json")
    assert json.loads(capsys.readouterr().out)["images"] == 16


def test_unreadable_images_are_excluded_and_listed(
    photos: Path, teacher: Path, student: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "ants" / "3.png").write_bytes(b"not an image")
    run("compare", teacher, student, "--data", photos)
    out = capsys.readouterr().out
    assert out.startswith("photos, 15 images: ")
    assert "\n1 unreadable, excluded for all models:\n" in out
    with pytest.raises(DataError, match=r"3\.png' is not an image"):
        run("compare", teacher, student, "--data", photos, "--strict")


def test_invalid_arguments_are_one_line_errors(photos: Path, teacher: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", ["cats", "dogs"])
    headless = save_model(tmp_path / "headless", None, classes=0)
    write_class_folders(tmp_path / "unvalidated" / "train", ants=2, bees=2)
    (tmp_path / "unvalidated" / "val").mkdir()
    for words, message in (
        ((teacher,), r"^no `data`; expected fashion, or a folder of images"),
        ((teacher, "--data", tmp_path / "nowhere"), r"nowhere' does not exist; expected 'fashion'"),
        ((teacher, tmp_path / "nowhere", "--data", photos), r"nowhere does not exist; expected a checkpoint"),
        ((teacher, "--data", tmp_path / "unvalidated"), r"val has no images; expected "),
        ((teacher, other, "--data", photos), r"other cannot predict the classes of photos: 2 of the data's 2 classes"),
        ((teacher, headless, "--data", photos), r"headless has no head, so it cannot predict classes"),
        ((teacher, "--data", photos, "--batch", "0"), r"^--batch 0; expected at least 1$"),
        ((teacher, "--data", photos, "--workers", "-1"), r"^--workers -1; expected at least 0$"),
        ((teacher, "--data", photos, "--device", "gpu"), r"gpu is not a device"),
    ):
        with pytest.raises(VitrailError, match=message):
            run("compare", *words)


def test_exit_codes(vitrail_: Callable[..., Any], photos: Path, teacher: Path, student: Path) -> None:
    done = vitrail_("compare", teacher, student, "--data", photos)
    assert (done.code, done.err, done.out[:7]) == (0, "", "photos,")  # and no progress bar
    done = vitrail_("compare", teacher, student)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert done.err.startswith("vitrail: no --data; expected ")


def test_eval_of_one_head(
    vitrail_: Callable[..., Any],
    photos: Path,
    teacher: Path,
    student: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = list[float]()
    for words in ((), ("--head", "both"), ("--head", "class"), ("--head", "distill")):
        run("eval", student, "--data", photos, "--json", *words)
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
    one = save_model(tmp_path / "deit", ["ants", "bees"], "deit_tiny_patch16_224")
    for model in (teacher, one):
        for head in ("both", "class", "distill"):
            with pytest.raises(ConfigError, match=rf"^`head` {head} for .*{model.name}, which has one head; expected "):
                run("eval", model, "--data", photos, "--head", head)
    done = vitrail_("eval", teacher, "--data", photos, "--head", "tail")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
