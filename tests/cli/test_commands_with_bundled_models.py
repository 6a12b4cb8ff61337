"""Commands take the name of a bundled model wherever they take a checkpoint, and need no data for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.data.fashion import FASHION_CLASSES

Run = Callable[..., Any]
MODEL = "vit_fashion"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def skip_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes long and is tested with the page."""
    monkeypatch.setattr("vitrail.report.html_page.render_figure", "<figure id={1}>{0.title}</figure>".format)


def test_eval_uses_the_data_of_the_training(vitrail_: Run) -> None:
    done = vitrail_("eval", MODEL, "--json", "--batch", 250)
    assert (done.code, done.err) == (0, "")
    report = json.loads(done.out)
    assert (report["checkpoint"], report["data"], report["images"]) == (MODEL, "fashion", 1000)
    assert report["top1"] > 0.8


def test_predict_and_explain_take_example_photos(vitrail_: Run) -> None:
    done = vitrail_("predict", MODEL, "example:cat", "example:coffee", "--format", "json")
    assert done.code == 0
    rows = json.loads(done.out)
    assert [row["file"] for row in rows] == ["example:cat", "example:coffee"]
    assert {row["top"][0]["label"] for row in rows} <= {*FASHION_CLASSES}
    done = vitrail_("explain", MODEL, "example:cat", "--method", "grad-rollout")
    assert (done.code, done.err) == (0, "")
    assert [path.name for path in Path("explained").iterdir()] == ["cat.grad-rollout.png"]


@pytest.mark.usefixtures("skip_drawing")
def test_report_shows_test_images(vitrail_: Run) -> None:
    done = vitrail_("report", MODEL, "--images", 4, "--explained", 1)
    assert (done.code, done.err) == (0, "")
    assert "T-shirt/top" in Path("report.html").read_text("utf-8")


def test_summary_shows_the_saved_architecture(vitrail_: Run) -> None:
    done = vitrail_("summary", MODEL, "--json")
    assert (done.code, done.err) == (0, "")
    report, parameters = json.loads(done.out), sum(each.numel() for each in vitrail.load(MODEL).parameters())
    assert (report["parameters"], report["input"]) == (parameters, [1, 1, 28, 28])
    vitrail.save(vitrail.load(MODEL), "saved")
    assert json.loads(vitrail_("summary", "saved", "--json").out)["parameters"] == parameters
    fewer = json.loads(vitrail_("summary", MODEL, "--classes", 2, "--json").out)
    assert fewer["parameters"] == parameters - 8 * 65  # rows of the head and their biases


def test_summary_of_the_file_and_convert_take_the_name(vitrail_: Run) -> None:
    done = vitrail_("summary", MODEL, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["labels"] == [*FASHION_CLASSES]
    done = vitrail_("convert", MODEL, "copy", "--to", "vitrail")
    assert (done.code, done.err) == (0, "")
    assert vitrail.describe("copy").provenance["data"] == "fashion"


def test_translate_and_explain_take_the_name_of_a_text_model(vitrail_: Run) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra `text`")
    done = vitrail_("translate", "transformer_tatoeba", "Tom ist müde.", "--beam", 1)
    assert (done.code, done.err, done.out) == (0, "", "Tom is tired.\n")
    done = vitrail_("convert", "transformer_tatoeba", "copy", "--to", "vitrail")
    assert (done.code, done.err) == (0, "")
    assert vitrail_("translate", "copy", "Tom ist müde.", "--beam", 1).out == "Tom is tired.\n"


def test_a_text_model_is_refused_where_images_are_expected(vitrail_: Run) -> None:
    done = vitrail_("predict", "transformer_tatoeba", "example:cat")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "reads text" in done.err


@pytest.mark.slow
def test_export_takes_the_name(vitrail_: Run) -> None:
    done = vitrail_("export", MODEL, "exported")
    assert done.code == 0, done.err
    same = [
        [json.loads(vitrail_("predict", model, "example:cat", "--format", "json").out)[0]["top"][0]["label"]]
        for model in (MODEL, "exported")
    ]
    assert same[0] == same[1]


def test_training_starts_from_the_weights(vitrail_: Run) -> None:
    done = vitrail_("train", "--init", MODEL, "--epochs", 0.02, "--lr", 1e-6, "--threads", 1, "-o", "run")
    assert done.code == 0, done.err
    assert f"from {MODEL}" in done.out
    report = json.loads(vitrail_("compare", MODEL, "run", "--json").out)
    assert report["data"] == "fashion"


def test_a_near_miss_is_one_line(vitrail_: Run) -> None:
    for words in (("predict", "vit_fashon", "example:cat"), ("eval", "vit_fashon"), ("explain", "vit_fashon", "a.jpg")):
        done = vitrail_(*words)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith("vitrail: vit_fashon ")
        assert done.err.endswith("'vit_fashion'?\n")


@pytest.mark.usefixtures("skip_drawing")
def test_a_model_of_rgb_without_data_shows_the_example_photos(vitrail_: Run) -> None:
    model = vitrail.create("vit_tiny_patch16_224", image_size=32, width=12, depth=1, classes=3)
    vitrail.save(model, "model", preprocessing=vitrail.Preprocessing(image_size=32))
    done = vitrail_("report", "model", "--images", 2, "--explained", 2)
    assert done.code == 0
    assert done.err == "vitrail: note: no --data, so the figures show 2 example photos\n"
    page = Path("report.html").read_text("utf-8")
    assert "example:astronaut" in page
    assert "example:rocket" in page
