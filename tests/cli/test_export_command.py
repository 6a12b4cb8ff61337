"""vitrail export on the command line."""

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
from support.toy_translators import save_translator

import vitrail
from vitrail.export.description import CONFIG_FILE, ONNX_FILE, TORCH_PROGRAM_FILE, ExportDescription

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def photos(current_folder: Path) -> Path:
    (current_folder / "photos").mkdir()
    for number, pixels in enumerate(random_pixels(3, (60, 70))):
        Image.fromarray(pixels).save(current_folder / "photos" / f"{number}.png")
    (current_folder / "photos" / "broken.png").write_text("not an image")
    return Path("photos")


def read_export_description(folder: str) -> ExportDescription:
    return ExportDescription.from_json((Path(folder) / CONFIG_FILE).read_text(), folder)


def test_export_and_predict(vitrail_: Run, current_folder: Path, photos: Path) -> None:
    """With own images for the check, and another image size than the model's."""
    save_toy_model(current_folder / "model", depth=1)
    result = vitrail_(
        "export", "model", "new/out", "--image-size", "64x48", "--check", photos, "--labels", words(current_folder)
    )
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "new/out: onnx, logits, images of 64×48, any batch"
    assert lines[1].startswith("matches torch on 39 images to within ")
    assert lines[2] == "use it: vitrail predict new/out photo.jpg"
    assert len(result.err.splitlines()) == 1
    assert "broken.png" in result.err
    assert sorted(path.name for path in Path("new").iterdir()) == ["out"]
    assert read_export_description("new/out").provenance["checkpoint"] == "model"
    assert read_export_description("new/out").labels == tuple("vwxyz")

    result = vitrail_("predict", "new/out", photos / "0.png", "--format", "json")
    expected = vitrail.Predictor(
        vitrail.load("model", image_size=(64, 48)), preprocessing=PREPROCESSING, labels=[*"vwxyz"]
    ).predict(photos / "0.png")
    (row,) = json.loads(result.out)
    assert [each["label"] for each in row["top"]] == [each.label for each in expected.top]
    shares = [each.probability for each in expected.top]
    assert [each["probability"] for each in row["top"]] == pytest.approx(shares, abs=1e-4)

    before = (Path("new/out") / ONNX_FILE).read_bytes()
    result = vitrail_("export", "model", "new/out")
    assert (result.code, result.err) == (
        2,
        "vitrail: new/out already exists; use --overwrite to replace it, or choose another name\n",
    )
    assert (Path("new/out") / ONNX_FILE).read_bytes() == before
    result = vitrail_("export", "model", "new/out", "--overwrite", "--to", "torch-export")
    assert result.code == 0
    assert sorted(path.name for path in Path("new/out").iterdir()) == [CONFIG_FILE, TORCH_PROGRAM_FILE]
    assert read_export_description("new/out").labels == LABELS
    result = vitrail_("predict", "new/out", photos / "0.png")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "contains a program for torch.export.load" in result.err


def words(current_folder: Path) -> Path:
    (current_folder / "labels.txt").write_text("v\nw\nx\ny\nz\n")
    return current_folder / "labels.txt"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of `export_model`, which is replaced since it takes seconds."""
    from vitrail.export.export import ExportCheck

    found = list[dict[str, Any]]()

    def write(model: Any, folder: Path, **options: Any) -> Any:
        found.append({"model": model, "folder": folder, **options})
        given_fields = {name: options[name] for name in ("output", "preprocessing", "labels", "merge")}
        given_fields["multiple"] = 16 if options["dynamic"] else 0
        return ExportDescription(precision="fp32", classes=5, **given_fields), ExportCheck(36, 1e-6, 30)

    monkeypatch.setattr("vitrail.export.export.export_model", write)
    return found


def test_options_reach_the_export(vitrail_: Run, current_folder: Path, calls: list[dict[str, Any]]) -> None:
    save_toy_model(current_folder / "model", depth=1)
    result = vitrail_(
        *("export", "model", "out", "--to", "onnx-int8", "--features", "mean", "--portable", "--merge", 2),
        *("--preprocessing", "crop=0.5", "--preprocessing", "interpolation=bilinear", "--overwrite"),
    )
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "out: onnx-int8, mean, images of 48×32, any batch",
        "agrees with fp32 on 30 of 36 images",
        "use it: vitrail embed out photo.jpg",
    ]
    (given,) = calls
    assert (given["to"], given["output"], given["portable"], given["merge"]) == ("onnx-int8", "mean", True, 2)
    assert (given["preprocessing"].crop, given["preprocessing"].interpolation) == (0.5, "bilinear")
    assert (given["overwrite"], given["dynamic"], given["images"]) == (True, False, None)


@pytest.mark.parametrize("name", TOY_FIELDS)
def test_every_family_can_be_exported_for_any_size(
    name: str, vitrail_: Run, current_folder: Path, calls: list[dict[str, Any]]
) -> None:
    """Built-in families take any size, whether or not the checkpoint is dynamic."""
    save_toy_model(current_folder / "model", name)
    result = vitrail_("export", "model", "out", "--dynamic")
    assert (result.code, result.err) == (0, "")
    assert "images of any multiple of 16" in result.out
    (given,) = calls
    assert given["dynamic"]
    with torch.inference_mode():
        assert given["model"](torch.zeros(1, 3, 96, 64)).shape == (1, 5)


def test_family_without_dynamic_sizes_is_exported_for_one_size(
    vitrail_: Run, current_folder: Path, calls: list[dict[str, Any]]
) -> None:
    """Only an external family can lack `dynamic`."""
    from types import SimpleNamespace

    import vitrail.checkpoint.reading as reading

    Path("model").touch()
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
        result = vitrail_("export", "model", "out", "--dynamic")
    assert result.code == 0
    assert result.err == "vitrail: note: ViT takes one image size only: the export is for (48, 32)\n"
    assert "images of 48×32" in result.out
    assert not calls[0]["dynamic"]


def test_run_folder_is_exported(vitrail_: Run, current_folder: Path, calls: list[dict[str, Any]]) -> None:
    write_run_folder(current_folder / "run", current_folder / "data")
    assert vitrail_("export", "run", "out").code == 0
    assert calls[0]["labels"] == ("ants", "bees", "cats")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none", "out"], "none"),
        (["model"], "OUT"),
        (["model", "out", "--to", "tflite"], "tflite"),
        (["model", "out", "--features", "color"], "color"),
        (["model", "out", "--to", "torch-export", "--portable"], "--portable with --to torch-export"),
        (["model", "out", "--merge", "-1"], "--merge -1; expected at least 0"),
        (["model", "out", "--merge", "99"], "merge is 99 of the 6 patches"),
        (["model", "out", "--merge", "1", "--dynamic"], "--dynamic with --merge"),
        (["model", "out", "--image-size", "50"], "multiple of 16×16"),
        (["model", "out", "--image-size", "big"], "big"),
        (["model", "out", "--preprocessing", "crop=9999"], "crop is 9999"),
        (["model", "out", "--preprocessing", "color=1"], "unknown preprocessing field 'color'"),
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
        (["model", "out", "--for", "tritonn"], "web, container. Did you mean triton?"),
        (["model", "out", "--for", "triton", "--overwrite"], "--overwrite with --for; expected a new folder"),
        (["model", "out", "--for", "ray", "--to", "torch-export"], "--to torch-export with --for; expected"),
        (["model", "model", "--for", "triton"], "model already exists; --for writes a new folder"),
        (["model", "out", "--for", "web"], "has no ort.wasm.min.mjs; run npm install onnxruntime-web here"),
        (["model", "out", "--for", "ray", "--web-runtime", "."], "--web-runtime with --for ray; expected it with web"),
        (["model", "out", "--web-runtime", "."], "--web-runtime without --for web; expected both"),
    ],
)
def test_invalid_arguments_are_one_line_errors(
    words: list[str], message: str, vitrail_: Run, current_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the model was exported")

    monkeypatch.setattr("vitrail.export.export.write_onnx", fail)
    monkeypatch.setattr("vitrail.export.export.trace_to_exported_program", fail)
    save_toy_model(current_folder / "model")
    save_toy_model(current_folder / "mean", "mean")
    (current_folder / "three.txt").write_text("a\nb\nc\n")
    (current_folder / "empty").mkdir()
    before = {path: path.read_bytes() for path in sorted(current_folder.rglob("*")) if path.is_file()}
    result = vitrail_("export", *words)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert {path: path.read_bytes() for path in sorted(current_folder.rglob("*")) if path.is_file()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_a_one_line_error(vitrail_: Run, current_folder: Path) -> None:
    save_toy_model(current_folder / "model")
    (current_folder / "locked").mkdir(mode=0o555)
    result = vitrail_("export", "model", "locked/out")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "cannot write locked/out: Permission denied" in result.err


def damaged(source: Path, folder: Path, kind: str) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model, config = remove_checksums(folder) / ONNX_FILE, folder / CONFIG_FILE
    if kind == "cut off":
        model.write_bytes(model.read_bytes()[:2000])
    elif kind == "random":
        model.write_bytes(np.random.default_rng(0).bytes(2000))
    elif kind == "someone else's":
        other = onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "theirs",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 224, 224])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3, 224, 224])],
        )
        onnx.save(onnx.helper.make_model(other, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), model)
    elif kind == "without model.onnx":
        model.unlink()
    elif kind == "another format":
        config.write_text(config.read_text().replace('"format": 1', '"format": 99'))
    elif kind == "no JSON":
        config.write_text("{")
    elif kind == "someone else's description":
        config.write_text('{"architectures": ["ViTForImageClassification"]}')
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        *("cut off", "random", "someone else's", "without model.onnx"),
        *("another format", "no JSON", "someone else's description"),
    ],
)
def test_damaged_export_is_a_one_line_error(
    kind: str, vitrail_: Run, exported: ExportFinder, current_folder: Path, photos: Path
) -> None:
    folder = damaged(exported("onnx"), current_folder / "own", kind)
    for count in (["photos/0.png"], ["photos", "-o", "out.csv"]):
        result = vitrail_("predict", folder, *count)
        assert result.code == 2
        assert len(result.err.splitlines()) == 1
        assert "own" in result.err
        assert sorted(path.name for path in current_folder.iterdir()) == ["own", "photos"]


def test_exports_that_do_not_fit_the_command_are_refused(vitrail_: Run, exported: ExportFinder, photos: Path) -> None:
    for words, message in (
        (
            ["predict", exported("int8"), photos, "--exact"],
            "which is int8; expected a model exported to onnx",
        ),
        (["predict", exported("onnx"), photos, "--engine", "compiled"], "which is exported; expected onnx or auto"),
        (["embed", exported("onnx"), photos, "-o", "a.npy"], "returns logits; expected class"),
        (["predict", exported("tokens"), photos], "returns tokens; expected logits"),
    ):
        result = vitrail_(*words)
        assert (result.code, len(result.err.splitlines())) == (2, 1)
        assert message in result.err


def test_a_translator_for_ctranslate2(vitrail_: Run, current_folder: Path) -> None:
    pytest.importorskip("ctranslate2", reason="needs the extra `ctranslate2`")
    save_translator(current_folder / "model", share="none", output_bias=True)
    result = vitrail_("export", "model", "out", "--to", "ctranslate2")
    assert (result.code, result.err) == (0, "")
    assert result.out == "out: ctranslate2, de-en, 80 tokens\nmatches torch on 50 of 50 sentences\n"
    for words, message in {
        "export model out --to ctranslate2": "out already exists; use --overwrite",
        "export model b --merge 2": "--merge does not apply, since model reads text; remove it",
        "export model b --for triton": "--for does not apply, since model reads text; remove it",
        "export vit_fashion b --to ctranslate2": "--to ctranslate2 for vit_fashion, which reads images; expected onnx,",
        "export model b --to onnx": "--to onnx for model, which reads text; expected ctranslate2",
        "predict out example:cat": "out contains a model that translates, for ctranslate2.Translator",
    }.items():
        refused = vitrail_(*words.split())
        assert (refused.code, refused.err.count("\n")) == (2, 1), words
        assert refused.err.startswith(f"vitrail: {message}"), refused.err
    assert sorted(path.name for path in current_folder.iterdir()) == ["model", "out"]
