"""All engines agree; and what is no exported model is refused in one line."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support.toy_exports import (
    EXPORT_SPECS,
    LABELS,
    PREPROCESSING,
    TOY_FIELDS,
    ExportFinder,
    make_toy_model,
    random_pixels,
    reference_probabilities,
    remove_checksums,
    softmax_rows,
)

from vitrail.base.errors import CheckpointError, ConfigError, VitrailError
from vitrail.checkpoint import read
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import ImageItem
from vitrail.data.images.preprocessing import Preprocessing, resize_and_crop
from vitrail.data.photos import list_example_photos
from vitrail.export.description import CONFIG_FILE, ONNX_FILE
from vitrail.export.export import export_model
from vitrail.export.exported_model import ExportedModel
from vitrail.predict.predictor import Predictor
from vitrail.predict.torch_engine import TorchEngine

COMPILING = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of itself
PHOTOS = [str(path) for path in list_example_photos()]


@pytest.mark.parametrize("name", ["onnx", "any size", "portable"])
def test_export_predicts_as_eager_torch(exported: ExportFinder, name: str) -> None:
    """From the files of real photos to their probabilities, the same classes in the same order."""
    model = make_toy_model(EXPORT_SPECS[name].model)
    eager, onnx_ = Predictor(model, preprocessing=PREPROCESSING, labels=LABELS), Predictor(exported(name))
    assert (onnx_.engine.name, onnx_.engine.exact, onnx_.classes) == ("onnx", True, 5)
    for a, b in zip(eager.predict_all(PHOTOS), onnx_.predict_all(PHOTOS, batch=3), strict=True):
        assert [each.label for each in a.top] == [each.label for each in b.top]
        assert [each.probability for each in a.top] == pytest.approx([each.probability for each in b.top], abs=1e-4)
    assert (
        np.abs(softmax_rows(eager.engine.run(random_pixels())) - reference_probabilities(model, random_pixels())).max()
        < 1e-6
    )


def test_features_as_eager_torchs(exported: ExportFinder) -> None:
    eager = Predictor(make_toy_model("rotary"), preprocessing=PREPROCESSING, output="tokens").engine.run(
        random_pixels()
    )
    found = Predictor(exported("tokens"), output="tokens").engine.run(random_pixels())
    assert found.shape == eager.shape == (3, 2 + 6, 16)
    assert np.abs(found - eager).max() < 1e-4 * np.abs(eager).max()
    with pytest.raises(ConfigError, match="returns tokens; expected logits"):
        Predictor(exported("tokens"), output="logits")
    with pytest.raises(ConfigError, match="computes features, tokens; expected output='logits'"):
        Predictor(exported("tokens"), output="tokens").predict(PHOTOS[0])


def test_pixels_are_the_same_with_every_engine(exported: ExportFinder) -> None:
    eager, onnx_ = Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING), Predictor(exported("onnx"))
    for photo in PHOTOS:
        seen = onnx_.prepare_image(photo)
        assert np.array_equal(seen, eager.prepare_image(photo))
        assert np.array_equal(seen, np.asarray(resize_and_crop(open_image(photo), PREPROCESSING)))
        assert np.array_equal(seen, decode_for_model(photo, PREPROCESSING))


@pytest.mark.parametrize("name", ["onnx", "int8"])
def test_several_calls_at_once(exported: ExportFinder, name: str) -> None:
    engine = ExportedModel(exported(name), streams=4)
    questions = [random_pixels(2, seed=n) for n in range(16)]
    expected = [engine.run(each) for each in questions]
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(a, b) for a, b in zip(pool.map(engine.run, questions), expected, strict=True))


def test_torch_has_its_threads_back() -> None:
    before = torch.get_num_threads()
    engine = TorchEngine(make_toy_model("vit"), PREPROCESSING, threads=before + 1)
    seen = list[int]()
    inner = engine.output_function

    def looking(images: Any) -> Any:
        seen.append(torch.get_num_threads())
        return inner(images)

    engine.output_function = looking
    engine.run(random_pixels())
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_another_size_where_the_file_takes_it(exported: ExportFinder) -> None:
    large = Preprocessing(image_size=(64, 96), crop=0.8, mean=PREPROCESSING.mean, std=PREPROCESSING.std)
    found = Predictor(exported("any size"), preprocessing=large).predict(PHOTOS[0])
    expected = Predictor(make_toy_model("vit any size"), preprocessing=large, labels=LABELS).predict(PHOTOS[0])
    assert [each.probability for each in found.top] == pytest.approx(
        [each.probability for each in expected.top], abs=1e-4
    )
    assert Predictor(exported("onnx"), preprocessing=large).preprocessing.image_size == (48, 32), (
        "as of a model of one size"
    )
    with pytest.raises(ConfigError, match="images of 50×96 pixels; expected multiples of 16"):
        Predictor(exported("any size"), preprocessing=large.with_fields({"image_size": (50, 96)}))
    with pytest.raises(ConfigError, match="another mean or std"):
        Predictor(exported("onnx"), preprocessing=Preprocessing(image_size=(48, 32)))


@pytest.fixture
def own(exported: ExportFinder, tmp_path: Path) -> Path:
    """An export that may be damaged."""
    shutil.copytree(exported("onnx"), tmp_path / "own")
    return remove_checksums(tmp_path / "own")


def refused(place: Path | str) -> str:
    with pytest.raises(VitrailError) as caught:
        ExportedModel(place)
    assert isinstance(caught.value, CheckpointError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("left", [0, 1, 7, 100, 4000, -1000, -1])
def test_truncated_file_is_refused(own: Path, left: int) -> None:
    whole = (own / ONNX_FILE).read_bytes()
    (own / ONNX_FILE).write_bytes(whole[:left])
    assert str(own / ONNX_FILE) in refused(own)


@pytest.mark.parametrize("seed", range(3))
def test_invalid_file_is_refused(own: Path, seed: int) -> None:
    (own / ONNX_FILE).write_bytes(np.random.default_rng(seed).bytes(5000))
    assert "expected a complete ONNX file: export it again" in refused(own)


def test_bytes_turned_over(own: Path) -> None:
    """Anywhere in the graph: refused, or an answer; never another error. In weights nobody can tell."""
    whole, random = (own / ONNX_FILE).read_bytes(), np.random.default_rng(0)
    outcomes = set[str]()
    for _ in range(40):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            damaged[place] ^= int(random.integers(1, 256))
        (own / ONNX_FILE).write_bytes(damaged)
        try:
            ExportedModel(own)
        except CheckpointError as error:
            outcomes.add(str(error))
    assert outcomes
    assert not any("\n" in each for each in outcomes)


def someone_elses(path: Path, inputs: dict[str, tuple[int, list[Any]]], output: str = "logits") -> None:
    """A valid file that gives out its first input as float."""
    value, first = onnx.helper.make_tensor_value_info, next(iter(inputs))
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", [first], [output], to=onnx.TensorProto.FLOAT)],
        "theirs",
        [value(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [value(output, onnx.TensorProto.FLOAT, inputs[first][1])],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)


FLOAT, UINT8 = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8


@pytest.mark.parametrize(
    ("inputs", "output"),
    [
        ({"pixels": (FLOAT, ["n", 3, 224, 224])}, "logits"),
        ({"pixel_values": (UINT8, ["n", 48, 32, 3])}, "logits"),
        ({"pixels": (UINT8, ["n", 3, 48, 32])}, "logits"),
        ({"pixels": (UINT8, ["n", 48, 32, 3])}, "logits"),
        ({"pixels": (UINT8, ["n", 48, 32, 3])}, "answers"),
        ({"pixels": (UINT8, ["n", 48, 32, 3]), "mask": (FLOAT, [1])}, "logits"),
        ({"pixels": (UINT8, [])}, "logits"),
        ({"pixels": (UINT8, ["n", 5])}, "logits"),
    ],
)
def test_someone_elses_file(own: Path, tmp_path: Path, inputs: Any, output: str) -> None:
    """Alone it does not say what it is; under our description it is not what that says."""
    someone_elses(tmp_path / "theirs.onnx", inputs, output)
    assert "has no preprocessing" in refused(tmp_path / "theirs.onnx")
    someone_elses(own / ONNX_FILE, inputs, output)
    assert "expected pixels of uint8 (batch, 48, 32, 3) and logits of 5 classes" in refused(own)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": 2}, "of format 2; expected 1"),
        ({"exported": False}, "does not describe an exported model"),
        ({"classes": 6, "labels": None}, "expected pixels of uint8 (batch, 48, 32, 3) and logits of 6 classes"),
        ({"output": "class"}, "and class, as"),
        ({"labels": ["a"]}, "1 labels for 5 classes"),
        ({"preprocessing": {"image_size": [32, 48]}}, "expected pixels of uint8 (batch, 32, 48, 3)"),
        ({"preprocessing": {"image_size": [48, 32], "mean": [0.5], "std": [0.5]}}, "(batch, 48, 32, 1)"),
        ({"preprocessing": {"image_size": [0, 32]}}, "image_size is (0, 32)"),
    ],
)
def test_description_that_does_not_fit_the_file_is_refused(own: Path, fields: dict[str, Any], says: str) -> None:
    (own / CONFIG_FILE).write_text(json.dumps({**json.loads((own / CONFIG_FILE).read_text()), **fields}))
    assert says in refused(own)


def test_folder_with_missing_files(own: Path, exported: ExportFinder) -> None:
    (own / CONFIG_FILE).unlink()
    assert Predictor(own).labels == LABELS, "the file says it too"
    assert Predictor(str(own / ONNX_FILE)).predict(PHOTOS[0]).top[0].label in LABELS
    (own / CONFIG_FILE).write_text((exported("onnx") / CONFIG_FILE).read_text())
    (own / ONNX_FILE).unlink()
    assert f"{own / ONNX_FILE} is missing; expected what `vitrail export` wrote" in refused(own)
    assert "contains a program for torch.export.load" in refused(exported("program"))


def test_without_onnx_runtime(exported: ExportFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime, .* pip install .*\[export\]'$"):
        Predictor(exported("onnx"))


@pytest.mark.slow
@COMPILING
@pytest.mark.parametrize("name", TOY_FIELDS)
def test_eager_compiled_and_exported_agree(name: str, tmp_path: Path) -> None:
    """Of every family, pool and kind of positions."""
    model, pixels = make_toy_model(name), np.stack([decode_for_model(path, PREPROCESSING) for path in PHOTOS])
    export_model(model, tmp_path / "new", preprocessing=PREPROCESSING)
    expected = reference_probabilities(model, pixels)
    assert np.ptp(expected, axis=1).min() > 0.02
    for engine in (
        TorchEngine(model, PREPROCESSING),
        TorchEngine(model, PREPROCESSING, name="compiled"),
        ExportedModel(tmp_path / "new"),
    ):
        for batch in (8, 3, 1):
            assert np.abs(softmax_rows(engine.run(pixels[:batch])) - expected[:batch]).max() < 1e-4, (
                engine.name,
                batch,
            )


@pytest.mark.slow
@pytest.mark.parametrize("output", ["class", "mean", "tokens"])
@pytest.mark.parametrize("name", ["vit", "map", "distilled", "hybrid", "resnet"])
def test_features_agree(name: str, output: Any, tmp_path: Path) -> None:
    model = make_toy_model(name)
    if output == "class" and name == "resnet":
        with pytest.raises(ConfigError, match="without a class token"):
            export_model(model, tmp_path / "new", preprocessing=PREPROCESSING, output=output)
        return
    export_model(model, tmp_path / "new", preprocessing=PREPROCESSING, output=output)
    eager, found = (
        TorchEngine(model, PREPROCESSING, output).run(random_pixels()),
        ExportedModel(tmp_path / "new").run(random_pixels()),
    )
    assert np.abs(eager - found).max() < 1e-4 * np.abs(eager).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "map", "distilled"])
def test_merging_is_baked_in(name: str, tmp_path: Path) -> None:
    model = make_toy_model(name, image_size=(96, 64), depth=2)
    how = PREPROCESSING.with_fields({"image_size": (96, 64)})
    export_model(model, tmp_path / "new", preprocessing=how, merge=3)
    found, eager = Predictor(tmp_path / "new"), Predictor(model, preprocessing=how, merge=3)
    pixels = random_pixels(3, (96, 64))
    assert np.abs(softmax_rows(found.engine.run(pixels)) - softmax_rows(eager.engine.run(pixels))).max() < 1e-4
    assert np.abs(softmax_rows(found.engine.run(pixels)) - reference_probabilities(model, pixels, how)).max() > 1e-4, (
        "and it does something"
    )
    with pytest.raises(ConfigError, match="exported with 3"):
        Predictor(tmp_path / "new", merge=2)


REAL = {
    "vit": "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "deit": "weights/deit_tiny_patch16_224.pth",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@COMPILING
@pytest.mark.parametrize("key", REAL)
def test_public_weights_over_a_thousand_photos(key: str, shared: Callable[[str], Path]) -> None:
    """Exact engines within 1e-4 of each other; 8 bits agree on 96 of 100 and are as right to half a point."""
    found, folder = read(shared(REAL[key])), shared("imagenet-val-1000")
    assert found.description.preprocessing is not None
    how = found.description.preprocessing.with_fields({"crop": 0.875})
    paths = sorted(path for path in folder.rglob("*.*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    assert len(paths) == 1000
    truth = np.array([int(path.parent.name) for path in paths])
    probabilities = dict[str, Any]()
    for name in ("eager", "compiled", "onnx", "int8"):
        predictor = Predictor(found.model, preprocessing=how, engine=name)
        rows = predictor.iterate_results((ImageItem(each, each.name) for each in paths), batch=20)
        probabilities[name] = softmax_rows(np.stack([row.values for row in rows if row.values is not None]))
    for name in ("compiled", "onnx"):
        assert np.abs(probabilities[name] - probabilities["eager"]).max() < 1e-4
        assert (probabilities[name].argmax(1) == probabilities["eager"].argmax(1)).all()
    same = (probabilities["int8"].argmax(1) == probabilities["eager"].argmax(1)).mean()
    right = {name: (each.argmax(1) == truth).mean() for name, each in probabilities.items()}
    assert same >= 0.96
    assert abs(right["int8"] - right["eager"]) <= 0.005
