"""vitrail eval on the command line."""

import csv
import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.noisy_weights import add_weight_noise
from support.saved_models import write_convnet_folder
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.cli import build_app


def run(*words: object) -> None:
    build_app()(
        [str(word) for word in ("eval", *words)], exit_on_error=False, print_error=False, result_action="return_value"
    )


def save_model(folder: Path, labels: list[str] | None, **fields: Any) -> Path:
    fields = {"image_size": 32, "classes": 2, "depth": 1, "width": 16, "heads": 2, **fields}
    model = add_weight_noise(vitrail.create("vit_tiny_patch16_224", **fields), std=0.3)
    vitrail.save(model, folder, labels=labels, preprocessing=vitrail.Preprocessing(image_size=32))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six photos per class in one folder."""
    for name in ("ants", "bees"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(6):
            pixels = np.random.default_rng(n).integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{n}.png")
    return tmp_path / "photos"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", ["bees", "ants"])


def make_run(folder: Path, data: Path, **request: Any) -> Path:
    save_model(folder / "model", ["ants", "bees"])
    plan = {"request": {"data": str(data), "val_share": 0.5, **request}, "recipe": {"name": "probe", "seed": 3}}
    (folder / "run.json").write_text(json.dumps(plan))
    return folder


def test_report(photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    run(model, "--data", photos)
    out = capsys.readouterr().out
    assert out.startswith("top-1 50.00%, loss ")
    assert "; 12 images, " in out.splitlines()[0]
    assert "\nants        6 " in out
    assert "\nmost confused  taken for  images\n" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_json_is_the_only_output(photos: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, "--data", photos, "--json", "--batch", "5")
    data = json.loads(capsys.readouterr().out)
    assert (data["images"], data["top1"], data["data"], data["checkpoint"]) == (12, 0.5, "photos", str(model))
    assert [each["label"] for each in data["classes"]] == ["bees", "ants"]


def test_an_engine_gives_the_same_results(photos: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = list[dict[str, Any]]()
    for words in ((), ("--engine", "eager", "--streams", "2", "--threads", "1"), ("--engine", "bfloat16")):
        run(model, "--data", photos, "--json", "--batch", "5", *words)
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["top1"] == found[0]["top1"]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    assert found[2]["loss"] == pytest.approx(found[0]["loss"], rel=0.1)
    assert found[2]["loss"] != found[0]["loss"]
    with pytest.raises(ConfigError, match="`exact` with `engine` bfloat16, which is not exact"):
        run(model, "--data", photos, "--exact", "--engine", "bfloat16")


def test_results_are_written_to_a_folder(
    photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    run(model, "--data", photos, "--out", tmp_path / "new" / "results")
    names = ["confusion.png", "evaluation.json", "reliability.png"]
    assert sorted(path.name for path in (tmp_path / "new" / "results").iterdir()) == names
    assert all(name in capsys.readouterr().out for name in names[:1])
    assert json.loads((tmp_path / "new" / "results" / "evaluation.json").read_text("utf-8"))["images"] == 12


def test_output_folder_is_checked_first(
    photos: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VitrailError, match=r"^cannot make the folder "):
        run(model, "--data", photos, "--out", tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib$"):
        run(model, "--data", photos, "--out", tmp_path / "results")
    assert capsys.readouterr().out == ""


def test_other_image_size_and_crop(photos: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = list[float]()
    for words in ((), ("--image-size", "48"), ("--preprocessing", "crop=0.5")):
        run(model, "--data", photos, "--json", *words)
        results.append(json.loads(capsys.readouterr().out)["loss"])
    assert len(set(results)) == 3


def test_run_is_evaluated_on_held_out_images(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", photos)
    for words in ((), ("--data", photos), ("--data", f"{photos}/../photos")):
        run(folder, "--json", *words)
        assert json.loads(capsys.readouterr().out)["images"] == 6
    run(folder / "model", "--data", photos, "--json")
    assert json.loads(capsys.readouterr().out)["images"] == 12


def test_unfinished_run_is_refused(photos: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", photos)
    (folder / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"is a run that has not finished.* `resume` "):
        run(folder, "--data", photos)


def test_unreadable_images_are_skipped_and_listed(
    photos: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(3):
        (photos / "ants" / f"{n}.png").write_bytes(b"not an image")
    run(model, "--data", photos)
    out = capsys.readouterr().out
    assert "; 9 images, " in out
    assert "\nskipped, 3 unreadable:\n" in out
    assert "0.png' is not" in out, "long lines are shortened"
    with pytest.raises(DataError, match=r"0\.png' is not an image"):
        run(model, "--data", photos, "--strict")


def test_invalid_arguments_are_one_line_errors(photos: Path, model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", ["cats", "dogs"])
    headless = save_model(tmp_path / "headless", None, classes=0)
    (tmp_path / "real.json").write_text(json.dumps([[0]] * 50_000))
    real = tmp_path / "real.json"
    for words, message in (
        ((model,), r"^no `data`; expected fashion, or a folder of images"),
        ((model, "--data", tmp_path / "nowhere"), r"nowhere' does not exist; expected 'fashion'"),
        ((tmp_path / "nowhere", "--data", photos), r"nowhere does not exist; expected a checkpoint"),
        (
            (other, "--data", photos),
            r"^2 of the data's 2 classes \(ants, bees\) are not among the model's 2 classes \(cats, dogs\)",
        ),
        ((headless, "--data", photos), r"headless has no head"),
        ((model, "--data", photos, "--batch", "0"), r"^--batch 0; expected at least 1$"),
        ((model, "--data", photos, "--workers", "-1"), r"^--workers -1; expected at least 0$"),
        ((model, "--data", photos, "--device", "gpu"), r"gpu is not a device"),
        ((model, "--data", photos, "--image-size", "33"), r"33×33 pixels; expected a multiple of 16×16"),
        (
            (model, "--data", photos, "--preprocessing", "crip=1"),
            r"^unknown preprocessing field 'crip'; did you mean 'crop'",
        ),
        ((model, "--data", photos, "--preprocessing", "mean=[0.5]"), r"1 means and 3 stds"),
        (
            (model, "--data", photos, "--real", real),
            r"has no ReaL labels for photos; expected images named ILSVRC2012_val_",
        ),
    ):
        with pytest.raises(VitrailError, match=message):
            run(*words)


def test_real_labels(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, path in enumerate(sorted(photos.rglob("*.png")), 1):
        path.rename(path.with_name(f"ILSVRC2012_val_{number:08}.png"))
    real_labels = [[n % 1000, 1] if n % 2 else [] for n in range(50_000)]
    (tmp_path / "real.json").write_text(json.dumps(real_labels))
    model = save_model(tmp_path / "thousand", ["ants", "bees", *map(str, range(998))], classes=1000)
    run(model, "--data", photos, "--real", tmp_path / "real.json", "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["real_images"] == 6
    assert 0 <= data["real"] <= 1
    two = save_model(tmp_path / "two", ["ants", "bees"])
    with pytest.raises(ConfigError, match=r"^`real` for a model of 2 classes; expected ImageNet's 1000$"):
        run(two, "--data", photos, "--real", tmp_path / "real.json")


def test_exit_codes(vitrail_: Callable[..., Any], photos: Path, model: Path) -> None:
    done = vitrail_("eval", model, "--data", photos)
    assert (done.code, done.err, done.out[:6]) == (0, "", "top-1 ")  # and no progress bar
    (photos / "ants" / "0.png").write_bytes(b"not an image")
    done = vitrail_("eval", model, "--data", photos, "--strict")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert done.err.startswith(f"vitrail: '{photos}/ants/0.png' is not an image; expected ")


def test_public_weights_from_a_file(
    shared: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(shared("imagenet-val-1000").iterdir())[:20]:
        (tmp_path / path.name).symlink_to(path)
    weights, real = shared("weights/deit_tiny_patch16_224.pth"), shared("imagenet-real.json")
    run(weights, "--data", tmp_path, "--real", real, "--preprocessing", "crop=0.875")
    seen = capsys.readouterr()
    assert "; 20 images, " in seen.out
    assert "ReaL top-1 " in seen.out
    assert "class numbers of the model" in seen.err


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_wrong_predictions_as_a_list(
    photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lists" / "wrong.csv"
    run(model, "--data", photos, "--wrong", out, "--batch", "5")
    assert capsys.readouterr().out.endswith(f"\n\n6 of 12 are predicted wrong: {out}, most confident mistakes first\n")
    rows = read_rows(out)
    assert [*rows[0]] == ["file", "label", "predicted", "probability", "label_probability"]
    found = [float(row["probability"]) for row in rows]
    assert found == sorted(found, reverse=True)
    predictor = vitrail.Predictor(model)
    wrong = {str(path) for path in photos.rglob("*.png") if predictor.predict(path).top[0].label != path.parent.name}
    assert {row["file"] for row in rows} == wrong
    assert len(rows) == len(wrong) == 6
    for row in rows:
        top, second = predictor.predict(row["file"]).top
        assert (row["predicted"], row["label"]) == (top.label, second.label)
        assert Path(row["file"]).parent.name == row["label"]
        assert float(row["probability"]) == pytest.approx(top.probability, abs=1e-4)
        assert float(row["label_probability"]) == pytest.approx(second.probability, abs=1e-4)


def test_formulas_in_the_list_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_class_folders(tmp_path / "=photos", **{"=1+1": 4, "@bees": 4})
    save_model(tmp_path / "model", ["=1+1", "@bees"])
    run("model", "--data", "=photos", "--wrong", "wrong.csv")
    for row in read_rows(tmp_path / "wrong.csv"):
        assert row["file"].startswith("./=photos/")
        assert {row["label"], row["predicted"]} == {"'=1+1", "'@bees"}


def test_wrong_predictions_as_a_page(
    photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "ants" / "0.png").rename(photos / "ants" / "<script>alert(1)<|script>.png")
    run(model, "--data", photos, "--wrong", tmp_path / "wrong.html")
    page = (tmp_path / "wrong.html").read_text("utf-8")
    assert "<h1>6 of 12 images predicted wrong</h1>" in page
    assert page.count("<article>") == 6
    assert page.count('src="data:image/webp;base64,') == 12, "each image, and what the model looked at"
    assert "<script" not in page
    assert "(gradient rollout over 1 layer)" in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page), "one file that works offline"
    run(model, "--data", photos, "--wrong", tmp_path / "wrong.csv")
    names = [re.escape(html.escape(row["file"])) for row in read_rows(tmp_path / "wrong.csv")]
    assert re.search(".*".join(f'class="file">{name}<' for name in names), page), "in the order of the list"


def test_a_page_shows_the_most_confident_of_many(
    photos: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.report.evaluation_report.MAX_SHOWN", 2)
    run(model, "--data", photos, "--wrong", tmp_path / "wrong.html")
    page = (tmp_path / "wrong.html").read_text("utf-8")
    assert page.count("<article>") == 2
    assert "The 2 most confident of 6 are shown." in page


@pytest.mark.parametrize("kind", ["exported", "convnet"])
def test_a_page_without_maps(photos: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "exported":
        pytest.importorskip("onnxruntime", reason="needs the extra `export`")
        from vitrail.export.export import export_model

        loaded = vitrail.open_model(save_model(tmp_path / "torch", ["ants", "bees"]))
        export_model(loaded.module, tmp_path / "model", preprocessing=loaded.preprocessing, labels=loaded.labels)
    else:
        write_convnet_folder(tmp_path / "model")
    run(tmp_path / "model", "--data", photos, "--wrong", tmp_path / "wrong.html")
    page = (tmp_path / "wrong.html").read_text("utf-8")
    assert page.count("data:image/webp") == page.count("<article>") > 0
    assert "What the model looked at is not shown: " in page


def test_no_wrong_predictions(photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, "--data", photos, "--wrong", tmp_path / "all.csv")
    for row in read_rows(tmp_path / "all.csv"):
        Path(row["file"]).unlink()
    capsys.readouterr()
    for name in ("wrong.csv", "wrong.html"):
        run(model, "--data", photos, "--wrong", tmp_path / name)
        assert capsys.readouterr().out.endswith(f"\n\nno image is predicted wrong: {tmp_path / name} lists none\n")
    assert (tmp_path / "wrong.csv").read_text() == "file,label,predicted,probability,label_probability\n"
    assert "<h1>No image was predicted wrong</h1>" in (tmp_path / "wrong.html").read_text("utf-8")


def test_the_last_line_says_how_to_list_what_is_wrong(
    photos: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, "--data", photos)
    *_, empty, last = capsys.readouterr().out.splitlines()
    expected = "6 of 12 are predicted wrong: list them with --wrong wrong.csv, see them with --wrong wrong.html"
    assert (empty, last) == ("", expected)


def test_names_of_the_file_of_wrong_predictions(photos: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for name, message in (
        ("wrong.txt", r"^--wrong .*wrong\.txt; expected a file name that ends in \.csv or \.html$"),
        ("wrong", r"expected a file name that ends in \.csv or \.html$"),
        ("folder.csv", r"^--wrong .*folder\.csv is a folder; expected the name of a file$"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(model, "--data", photos, "--wrong", tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            run(model, "--data", photos, "--wrong", tmp_path / name, "--overwrite")
    with pytest.raises(VitrailError, match=r"nowhere' does not exist"):
        run(model, "--data", tmp_path / "nowhere", "--wrong", tmp_path / "new" / "wrong.csv")
    assert not (tmp_path / "new").exists()
