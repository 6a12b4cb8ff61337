"""vitrail predict on the command line."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_processes import drop_engine_notes, start_command, wait_for_exit
from support.saved_models import LABELS, write_model_folder
from support.unreadable_images import add_unreadable_images

import vitrail

Run = Callable[..., Any]


NAMES = ["photos/a/1.png", "photos/a/2.png", "photos/b/1.png", "photos/b/c/3.jpg"]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_rows_are_the_predictions_of_the_model(vitrail_: Run, model: Path, photos: Path) -> None:
    expected = list(vitrail.Predictor(model).predict_all(NAMES, top=2))
    result = vitrail_("predict", model, photos, "--top", 2, "--format", "jsonl")
    assert (result.code, drop_engine_notes(result.err)) == (0, "")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["file"] for row in rows] == NAMES
    for row, prediction in zip(rows, expected, strict=True):
        assert [each["index"] for each in row["top"]] == [each.index for each in prediction.top]
        assert [each["label"] for each in row["top"]] == [LABELS[each.index] for each in prediction.top]
        shares = [each.probability for each in prediction.top]
        assert [each["probability"] for each in row["top"]] == pytest.approx(shares, abs=2e-6)


def test_one_image_is_printed_as_a_table(vitrail_: Run, model: Path, photos: Path) -> None:
    result = vitrail_("predict", model, NAMES[0], "--top", 99)
    assert (result.code, drop_engine_notes(result.err)) == (0, "")
    lines = result.out.splitlines()
    assert sorted(line.split("%  ")[1] for line in lines) == sorted(LABELS)
    assert sum(float(line.split("%")[0]) for line in lines) == pytest.approx(100, abs=0.5)
    several = vitrail_("predict", model, NAMES[0], NAMES[1], "--top", 99).out
    assert several.startswith("".join([f"{NAMES[0]}\n", *(f"  {line}\n" for line in lines), f"\n{NAMES[1]}\n"]))


@pytest.mark.usefixtures("photos")
def test_another_image_size_resamples_the_positions(vitrail_: Run, model: Path) -> None:
    expected = vitrail.Predictor(
        vitrail.load(model, image_size=64), labels=LABELS, preprocessing=vitrail.describe(model).preprocessing
    )
    result = vitrail_("predict", model, NAMES[0], "--image-size", 64)
    assert (result.code, drop_engine_notes(result.err)) == (0, "")
    assert result.out == f"{expected.predict(NAMES[0])}\n"
    assert result.out != vitrail_("predict", model, NAMES[0]).out
    assert vitrail_("embed", model, NAMES[0], "--image-size", 64, "--features", "tokens", "-o", "tokens.npy").code == 0
    assert np.load("tokens.npy").shape[:2] == (1, expected.features(NAMES[0], "tokens").shape[0])


def test_every_format_to_a_file(vitrail_: Run, model: Path, photos: Path) -> None:
    kinds = ["csv", "jsonl", "json", *(["parquet"] if can_parquet() else [])]
    for kind in kinds:
        result = vitrail_("predict", model, photos, "-o", f"new/out.{kind}", "--top", 1)
        assert (result.code, drop_engine_notes(result.err)) == (0, "")
        assert result.out.startswith(f"new/out.{kind}: 4 images, ")
    assert {path.name for path in Path("new").iterdir()} == {f"out.{kind}" for kind in kinds}
    found = json.loads(Path("new/out.json").read_text())
    assert [row["file"] for row in found] == NAMES
    assert found == [json.loads(line) for line in Path("new/out.jsonl").read_text().splitlines()]
    rows = rows_of(Path("new/out.csv").read_text())
    answers = [(row["file"], row["top"][0]["label"], str(row["top"][0]["probability"])) for row in found]
    assert answers == [(row["file"], row["label_1"], row["probability_1"]) for row in rows]
    if "parquet" in kinds:
        from pyarrow.parquet import read_table

        table: Any = read_table("new/out.parquet")
        assert [row["label_1"] for row in table.to_pylist()] == [row["label_1"] for row in rows]


def can_parquet() -> bool:
    try:
        import pyarrow  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return False
    return True


def test_unreadable_images_are_named_and_the_others_processed(vitrail_: Run, model: Path, photos: Path) -> None:
    good = rows_of(vitrail_("predict", model, photos, "--format", "csv").out)
    bad = add_unreadable_images(photos)
    Path("empty").mkdir()
    result = vitrail_("predict", model, "empty", photos, "photos/none.png", "no*.jpg", "-o", "out.csv", "--batch", 3)
    assert result.code == 2
    *lines, last = drop_engine_notes(result.err).splitlines()
    assert lines[0].startswith("vitrail: 'empty' has no images; expected")
    assert lines[1].startswith("vitrail: 'no*.jpg' matches no images; expected")
    assert last == (
        "vitrail: 8 of 12 images and 2 of the arguments could not be read; the results of the others are in out.csv"
    )
    rows = rows_of(Path("out.csv").read_text())
    assert [row["file"] for row in rows] == [*sorted([*NAMES, *(f"photos/{name}" for name in bad)]), "photos/none.png"]
    done = [row for row in rows if not row["error"]]
    assert [(row["file"], row["label_1"]) for row in done] == [(row["file"], row["label_1"]) for row in good]
    shares = [float(row["probability_1"]) for row in done]
    assert shares == pytest.approx([float(row["probability_1"]) for row in good], abs=1e-5)
    failed = {row["file"]: row["error"] for row in rows if row["error"]}
    assert lines[2:] == [f"vitrail: {error}" for error in failed.values()]
    for name, message in {**bad, "none.png": "does not exist"}.items():
        assert failed[f"photos/{name}"].startswith(f"'photos/{name}' "), failed
        assert message in failed[f"photos/{name}"], failed


@pytest.mark.parametrize("name", ["photos/none.png", "photos/a/text.png", "empty", "no*.jpg"])
def test_single_unreadable_image_is_a_one_line_error(vitrail_: Run, model: Path, photos: Path, name: str) -> None:
    add_unreadable_images(photos)
    Path("empty").mkdir()
    result = vitrail_("predict", model, name)
    assert (result.code, result.out) == (2, "")
    assert drop_engine_notes(result.err).startswith(f"vitrail: '{name}' ")
    assert drop_engine_notes(result.err).count("\n") == 1


def test_limits_are_options(vitrail_: Run, model: Path, photos: Path) -> None:
    for words in (("--max-pixels", 29), ("--max-bytes", 50)):
        result = vitrail_("predict", model, NAMES[0], *words)
        assert result.code == 2
        assert drop_engine_notes(result.err).startswith(f"vitrail: '{NAMES[0]}' ")
        assert vitrail_("predict", model, NAMES[0], words[0], 5000).code == 0


def test_image_given_twice_is_processed_once(vitrail_: Run, model: Path, photos: Path) -> None:
    result = vitrail_("predict", model, NAMES[1], photos, "./photos/a/1.png", "--format", "csv")
    assert (result.code, drop_engine_notes(result.err)) == (
        0,
        "vitrail: note: 2 images given twice; each is processed once\n",
    )
    assert [row["file"] for row in rows_of(result.out)] == [NAMES[1], NAMES[0], *NAMES[2:]]


def test_names_that_are_not_valid_utf_8(vitrail_: Run, model: Path, photos: Path) -> None:
    strange = os.fsdecode(b"photos/\xff\n.png")
    Path(NAMES[0]).rename(strange)
    for kind in ("csv", "json", "jsonl"):
        assert vitrail_("predict", model, photos, "-o", f"out.{kind}").code == 0
    text = Path("out.csv").read_bytes()
    assert os.fsencode(strange) in text
    assert json.loads(Path("out.json").read_text())[-1]["file"] == strange
    result = vitrail_("predict", model, photos)
    assert (result.code, drop_engine_notes(result.err)) == (0, "")
    assert "photos/\\udcff\\n.png" in result.out


BAD = {
    "": "predict needs IMAGES.",
    "http://example.org/a.jpg": "'http://example.org/a.jpg' is a URL, and URLs are not fetched; download it",
    "photos --top 0": "--top 0; expected 1 or more",
    "photos --batch 0": "--batch 0; expected at least 1",
    "photos --max-bytes 0": "--max-bytes 0; expected 1 or more",
    "photos --merge -1": "--merge -1; expected 0 or more tokens to merge",
    "photos --format xml": "--format 'xml' is not one of",
    "photos --formt csv": "Unknown option --formt. Did you mean --format?",
    "photos --format parquet": "--format parquet needs a file: set -o OUT.parquet",
    "photos -o out.txt": "-o out.txt has none of the suffixes .csv",
    "photos -o photos": "-o photos has none of the suffixes",
    "photos -o photos --format csv": "photos is a folder; expected the name of a file",
    "photos -o there.csv": "there.csv already exists; use --overwrite to replace it",
    "photos -o half.csv": "half.csv.partial is an unfinished job; use --resume",
    "photos -o there.csv/out.csv": "cannot make the folder there.csv: ",
    "photos --resume": "--resume needs -o OUT",
    "photos --overwrite": "--overwrite needs -o OUT",
    "photos --exact --fast": "--exact with --fast, which is not exact; use one of them",
    "photos --exact --engine int8": "--exact with --engine int8, which is not exact",
    "photos --labels nowhere.txt": "--labels nowhere.txt cannot be read: ",
    "photos --labels imagenet": "1000 labels for 3 classes; expected one per class",
    "photos --image-size 384px": "--image-size '384px'; expected pixels such as 384",
    "photos --preprocessing image_size=384": "--preprocessing image_size=384; expected --image-size",
    "photos --labels there.csv": "0 labels for 3 classes; expected one per class",
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_options_are_one_line_errors_before_any_work(
    vitrail_: Run, model: Path, photos: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("there.csv").touch()
    Path("half.csv.partial").mkdir()
    Path("half.csv.partial/job.json").write_text('{"written by": "vitrail 0"}')

    def fail(*_: object) -> None:
        pytest.fail("the model was run")

    monkeypatch.setattr("vitrail.predict.predictor.Predictor.iterate_results", fail, raising=False)
    result = vitrail_("predict", model, *words.split())
    assert (result.code, result.out, drop_engine_notes(result.err).count("\n")) == (2, "", 1), drop_engine_notes(
        result.err
    )
    assert drop_engine_notes(result.err).startswith(f"vitrail: {BAD[words]}")


def test_missing_model_is_a_one_line_error(vitrail_: Run, photos: Path) -> None:
    result = vitrail_("predict", "nowhere", photos, "-o", "out.csv")
    assert (result.code, result.out, drop_engine_notes(result.err).count("\n")) == (2, "", 1)
    assert drop_engine_notes(result.err).startswith("vitrail: nowhere does not exist; expected")
    assert not Path("out.csv.partial").exists()


def test_labels_from_a_file(vitrail_: Run, photos: Path, tmp_path: Path) -> None:
    plain = write_model_folder(tmp_path / "plain", labels=None, classes=3)
    Path("labels.txt").write_text("x\ny\nz\n")
    result = vitrail_("predict", plain, NAMES[0], "--labels", "labels.txt", "--format", "csv", "--top", 3)
    assert {rows_of(result.out)[0][f"label_{n}"] for n in (1, 2, 3)} == {"x", "y", "z"}
    result = vitrail_("predict", plain, NAMES[0], "--format", "csv", "--top", 3)
    assert {rows_of(result.out)[0][f"label_{n}"] for n in (1, 2, 3)} == {""}


def test_image_from_standard_input(model: Path, photos: Path, vitrail_: Run) -> None:
    expected = vitrail_("predict", model, NAMES[0], "--format", "csv").out
    words = ("predict", model, "-", "--format", "csv")
    process = start_command(words, stdin=Path(NAMES[0]), stdout=Path("stdout"), stderr=Path("stderr"))
    assert (wait_for_exit(process), drop_engine_notes(Path("stderr"))) == (0, "")
    (heading, row), (same, other) = (text.splitlines() for text in (expected, Path("stdout").read_text()))
    assert heading == same
    for name, ours, theirs in zip(
        heading.split(","), row.replace(NAMES[0], "-").split(","), other.split(","), strict=True
    ):
        if name.startswith("probability"):  # another process may add float32 numbers in another order
            assert float(theirs) == pytest.approx(float(ours), rel=1e-5)
        else:
            assert theirs == ours
    assert wait_for_exit(start_command(words, stderr=Path("stderr"))) == 2
    assert drop_engine_notes(Path("stderr")).startswith("vitrail: the given data is empty; expected an image")


@pytest.mark.slow
def test_exported_model_gives_the_same_predictions(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert vitrail_("export", model, "shipped").code == 0
    add_unreadable_images(photos)
    for name, given in (("torch.csv", model), ("onnx.csv", "shipped")):
        assert vitrail_("predict", given, photos, "-o", name).code == 2
    rows, expected = rows_of(Path("onnx.csv").read_text()), rows_of(Path("torch.csv").read_text())
    for row, other in zip(rows, expected, strict=True):
        assert [row[name] for name in ("file", "error", "label_1")] == [
            other[name] for name in ("file", "error", "label_1")
        ]
        if not row["error"]:
            assert float(row["probability_1"]) == pytest.approx(float(other["probability_1"]), abs=1e-4)
    result = vitrail_("embed", "shipped", photos, "-o", "f.npy")
    assert (result.code, result.out) == (2, "")
    assert drop_engine_notes(result.err).startswith("vitrail: shipped returns logits; expected class")


def test_jobs_need_no_torch() -> None:
    """The modules that a job with an exported model imports, without its engine."""
    names = ("cli.predict", "cli.embed", "predict.job")
    program = f"import sys, {', '.join(f'vitrail.{name}' for name in names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "safetensors", "yaml", "pyarrow", "onnxruntime", "rich.progress"} & set(done.stdout.split())
