"""vitrail export as a user meets it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from support.saved_models import write_run_folder
from support.toy_exports import (
    LABELS,
    PREPROCESSING,
    TOY_FIELDS,
    ExportFinder,
    make_toy_model,
    random_pixels,
    remove_checksums,
    save_toy_model,
)

import vitrail
from vitrail.export.description import CONFIG_FILE, ONNX_FILE, TORCH_PROGRAM_FILE, ExportDescription

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def photos(here: Path) -> Path:
    (here / "photos").mkdir()
    for number, pixels in enumerate(random_pixels(3, (60, 70))):
        Image.fromarray(pixels).save(here / "photos" / f"{number}.png")
    (here / "photos" / "broken.png").write_text("no picture")
    return Path("photos")


def about(folder: str) -> ExportDescription:
    return ExportDescription.from_json((Path(folder) / CONFIG_FILE).read_text(), folder)


def test_from_a_model_to_an_answer(vitrail_: Run, here: Path, photos: Path) -> None:
    """Checked on pictures of one's own too, and of another size than the model was made for."""
    save_toy_model(here / "model", depth=1)
    said = vitrail_("export", "model", "new/out", "--image-size", "64x48", "--check", photos, "--labels", words(here))
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "new/out: onnx, logits, images of 64×48, any batch"
    assert lines[1].startswith("equals torch on 39 images within ")
    assert lines[2] == "use it: vitrail predict new/out photo.jpg"
    assert len(said.err.splitlines()) == 1
    assert "broken.png" in said.err
    assert sorted(path.name for path in Path("new").iterdir()) == ["out"]
    assert about("new/out").provenance["checkpoint"] == "model"
    assert about("new/out").labels == tuple("vwxyz")

    said = vitrail_("predict", "new/out", photos / "0.png", "--format", "json")
    expected = vitrail.Predictor(
        vitrail.load("model", image_size=(64, 48)), preprocessing=PREPROCESSING, labels=[*"vwxyz"]
    ).predict(photos / "0.png")
    (row,) = json.loads(said.out)
    assert [each["label"] for each in row["top"]] == [each.label for each in expected.top]
    shares = [each.probability for each in expected.top]
    assert [each["probability"] for each in row["top"]] == pytest.approx(shares, abs=1e-4)

    before = (Path("new/out") / ONNX_FILE).read_bytes()
    said = vitrail_("export", "model", "new/out")
    assert (said.code, said.err) == (
        2,
        "vitrail: new/out already exists; use --overwrite to replace it, or choose another name\n",
    )
    assert (Path("new/out") / ONNX_FILE).read_bytes() == before
    said = vitrail_("export", "model", "new/out", "--overwrite", "--to", "torch-export")
    assert said.code == 0
    assert sorted(path.name for path in Path("new/out").iterdir()) == [CONFIG_FILE, TORCH_PROGRAM_FILE]
    assert about("new/out").labels == LABELS
    said = vitrail_("predict", "new/out", photos / "0.png")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "contains a program for torch.export.load" in said.err


def words(here: Path) -> Path:
    (here / "labels.txt").write_text("v\nw\nx\ny\nz\n")
    return here / "labels.txt"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the writer would have been asked, instead of the seconds that it takes."""
    from vitrail.export.export import ExportCheck

    found = list[dict[str, Any]]()

    def write(model: Any, folder: Path, **options: Any) -> Any:
        found.append({"model": model, "folder": folder, **options})
        told = {name: options[name] for name in ("output", "preprocessing", "labels", "merge")}
        told["multiple"] = 16 if options["dynamic"] else 0
        return ExportDescription(precision="fp32", classes=5, **told), ExportCheck(36, 1e-6, 30)

    monkeypatch.setattr("vitrail.export.export.export_model", write)
    return found


def test_every_flag_reaches_the_writer(vitrail_: Run, here: Path, asked: list[dict[str, Any]]) -> None:
    save_toy_model(here / "model", depth=1)
    said = vitrail_(
        *("export", "model", "out", "--to", "onnx-int8", "--features", "mean", "--portable", "--merge", 2),
        *("--preprocessing", "crop=0.5", "--preprocessing", "interpolation=bilinear", "--overwrite"),
    )
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "out: onnx-int8, mean, images of 48×32, any batch",
        "agrees with fp32 on 30 of 36 images",
        "use it: vitrail embed out photo.jpg",
    ]
    (given,) = asked
    assert (given["to"], given["output"], given["portable"], given["merge"]) == ("onnx-int8", "mean", True, 2)
    assert (given["preprocessing"].crop, given["preprocessing"].interpolation) == (0.5, "bilinear")
    assert (given["overwrite"], given["dynamic"], given["images"]) == (True, False, None)


@pytest.mark.parametrize("name", TOY_FIELDS)
def test_any_size_of_every_model(name: str, vitrail_: Run, here: Path, asked: list[dict[str, Any]]) -> None:
    """Every family of ours takes any, whether or not the checkpoint says so."""
    save_toy_model(here / "model", name)
    said = vitrail_("export", "model", "out", "--dynamic")
    assert (said.code, said.err) == (0, "")
    assert "images of any multiple of 16" in said.out
    (given,) = asked
    assert given["dynamic"]
    with torch.inference_mode():
        assert given["model"](torch.zeros(1, 3, 96, 64)).shape == (1, 5)


def test_a_family_of_one_size_has_it_baked_in(vitrail_: Run, here: Path, asked: list[dict[str, Any]]) -> None:
    """One from outside that has no `dynamic`, so none of ours."""
    from types import SimpleNamespace

    import vitrail.checkpoint.reading as reading

    model = make_toy_model("vit")
    model.config = SimpleNamespace(image_size=(48, 32), channels=3, classes=5)
    description = SimpleNamespace(config={}, preprocessing=PREPROCESSING, labels=None, provenance={})
    found = SimpleNamespace(model=model, description=description, report=SimpleNamespace(warnings=(), assumed={}))

    def describe(*_: object) -> Any:
        return description

    def read(*_: object, **__: object) -> Any:
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "describe", describe)
        patch.setattr(reading, "read", read)
        said = vitrail_("export", "model", "out", "--dynamic")
    assert said.code == 0
    assert said.err == "vitrail: note: ViT takes one image size only: the export is for (48, 32)\n"
    assert "images of 48×32" in said.out
    assert not asked[0]["dynamic"]


def test_the_model_of_a_run(vitrail_: Run, here: Path, asked: list[dict[str, Any]]) -> None:
    write_run_folder(here / "run", here / "data")
    assert vitrail_("export", "run", "out").code == 0
    assert asked[0]["labels"] == ("ants", "bees", "cats")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none", "out"], "none"),
        (["model"], "OUT"),
        (["model", "out", "--to", "tflite"], "tflite"),
        (["model", "out", "--features", "colour"], "colour"),
        (["model", "out", "--to", "torch-export", "--portable"], "--portable with --to torch-export"),
        (["model", "out", "--merge", "-1"], "--merge -1; expected at least 0"),
        (["model", "out", "--merge", "99"], "merge is 99 of the 6 patches"),
        (["model", "out", "--merge", "1", "--dynamic"], "--dynamic with --merge"),
        (["model", "out", "--image-size", "50"], "multiple of 16×16"),
        (["model", "out", "--image-size", "big"], "big"),
        (["model", "out", "--preprocessing", "crop=9999"], "crop is 9999"),
        (["model", "out", "--preprocessing", "colour=1"], "unknown preprocessing field 'colour'"),
        (["model", "out", "--labels", "three.txt"], "3 labels for 5 classes"),
        (["model", "out", "--labels", "none.txt"], "none.txt"),
        (["model", "out", "--check", "nowhere"], "--check has no image that can be read: 'nowhere' does not exist"),
        (["model", "out", "--check", "three.txt"], "--check has no image that can be read: 'three.txt'"),
        (["model", "out", "--check", "empty"], "'empty' has no images; expected"),
        (["model", "model"], "already exists"),
        (["model", "model", "--overwrite"], "is not an export, so it is not replaced"),
        (["model", "three.txt", "--overwrite"], "is not an export, so it is not replaced"),
        (["model", "three.txt/out"], "three.txt/out"),
        (["mean", "out", "--features", "class"], "without a class token; use mean or tokens"),
        (["headless", "out"], "no head"),
    ],
)
def test_a_wrong_call_is_one_line(
    words: list[str], says: str, vitrail_: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        pytest.fail("the model was exported")

    monkeypatch.setattr("vitrail.export.export.write_onnx", ask)
    monkeypatch.setattr("vitrail.export.export.trace_to_exported_program", ask)
    save_toy_model(here / "model")
    save_toy_model(here / "mean", "mean")
    vitrail.save(make_toy_model("vit", classes=0), here / "headless", preprocessing=PREPROCESSING)
    (here / "three.txt").write_text("a\nb\nc\n")
    (here / "empty").mkdir()
    before = {path: path.read_bytes() for path in sorted(here.rglob("*")) if path.is_file()}
    said = vitrail_("export", *words)
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
    assert says in said.err
    assert {path: path.read_bytes() for path in sorted(here.rglob("*")) if path.is_file()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_may_not_be_written(vitrail_: Run, here: Path) -> None:
    save_toy_model(here / "model")
    (here / "locked").mkdir(mode=0o555)
    said = vitrail_("export", "model", "locked/out")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "cannot write locked/out: Permission denied" in said.err


def damaged(source: Path, folder: Path, how: str) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model, config = remove_checksums(folder) / ONNX_FILE, folder / CONFIG_FILE
    if how == "cut off":
        model.write_bytes(model.read_bytes()[:2000])
    elif how == "random":
        model.write_bytes(np.random.default_rng(0).bytes(2000))
    elif how == "someone else's":
        other = onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "theirs",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 224, 224])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3, 224, 224])],
        )
        onnx.save(onnx.helper.make_model(other, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), model)
    elif how == "without model.onnx":
        model.unlink()
    elif how == "another format":
        config.write_text(config.read_text().replace('"format": 1', '"format": 99'))
    elif how == "no JSON":
        config.write_text("{")
    elif how == "someone else's description":
        config.write_text('{"architectures": ["ViTForImageClassification"]}')
    return folder


@pytest.mark.parametrize(
    "how",
    [
        *("cut off", "random", "someone else's", "without model.onnx"),
        *("another format", "no JSON", "someone else's description"),
    ],
)
def test_a_damaged_export_is_one_line(
    how: str, vitrail_: Run, exported: ExportFinder, here: Path, photos: Path
) -> None:
    folder = damaged(exported("onnx"), here / "own", how)
    for count in (["photos/0.png"], ["photos", "-o", "out.csv"]):
        said = vitrail_("predict", folder, *count)
        assert said.code == 2
        assert len(said.err.splitlines()) == 1
        assert "own" in said.err
        assert sorted(path.name for path in here.iterdir()) == ["own", "photos"]


def test_engines_that_do_not_go_together(vitrail_: Run, exported: ExportFinder, photos: Path) -> None:
    for words, says in (
        (
            ["predict", exported("int8"), photos, "--exact"],
            "which is int8; expected a model exported to onnx",
        ),
        (["predict", exported("onnx"), photos, "--engine", "compiled"], "which is exported; expected onnx or auto"),
        (["embed", exported("onnx"), photos, "-o", "a.npy"], "returns logits; expected class"),
        (["predict", exported("tokens"), photos], "returns tokens; expected logits"),
    ):
        said = vitrail_(*words)
        assert (said.code, len(said.err.splitlines())) == (2, 1)
        assert says in said.err
