"""int8: which operations are quantized, agreement with float32, and independence of the other images of a batch."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from support.toy_exports import (
    PREPROCESSING,
    ExportFinder,
    make_toy_model,
    random_pixels,
    reference_probabilities,
    softmax_rows,
)

from vitrail.base.errors import CheckpointError
from vitrail.export.agreement import count_agreeing_images, make_photo_crops
from vitrail.export.description import CONFIG_FILE, METADATA_KEY, ONNX_FILE, ExportDescription
from vitrail.export.exported_model import ExportedModel
from vitrail.export.quantize import quantize_onnx_file, write_int8_export


def run(path: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"pixels": each[None]})[0] for each in pixels])


def kinds(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_matrix_products_with_weights_are_int8(exported: ExportFinder) -> None:
    found = kinds(exported("int8") / ONNX_FILE)
    assert found.count("MatMulInteger") >= 8, "at least q and k and v, proj, fc1, fc2 of a block, the patches, the head"
    assert "MatMul" not in found
    weights = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in onnx.load(exported("int8") / ONNX_FILE).graph.initializer
    }
    integers = [each for each in weights.values() if each.dtype == np.int8 and each.size > 1]
    assert integers
    assert max(np.abs(each.astype(int)).max() for each in integers) <= 64, "of 7 bits, for CPUs without VNNI"


def test_int8_predictions_are_close_to_float32(exported: ExportFinder) -> None:
    pixels = make_photo_crops(32, PREPROCESSING)
    found, expected = (
        ExportedModel(exported("int8")).run(pixels),
        reference_probabilities(make_toy_model("vit"), pixels),
    )
    assert 1e-6 < np.abs(softmax_rows(found) - expected).max() < 0.15
    assert (found.argmax(1) == expected.argmax(1)).mean() >= 0.9


def test_agreement_with_float32_is_recorded(exported: ExportFinder) -> None:
    """The recorded agreement matches one counted again."""
    about = ExportDescription.from_json((exported("int8") / CONFIG_FILE).read_text(), "here")
    assert about.precision == "int8"
    assert about.agreement is not None
    assert about.agreement["pictures"] == 36
    pixels = np.concatenate(
        [make_photo_crops(32, PREPROCESSING), np.random.default_rng(0).integers(0, 256, (4, 48, 32, 3), dtype=np.uint8)]
    )
    same = ExportedModel(exported("int8")).run(pixels).argmax(1) == reference_probabilities(
        make_toy_model("vit"), pixels
    ).argmax(1)
    assert about.agreement["same"] == same.sum()


def test_prediction_does_not_depend_on_the_other_images_of_the_batch(exported: ExportFinder) -> None:
    engine = ExportedModel(exported("int8"))
    one = random_pixels(1, seed=5)
    black, white = np.zeros_like(one), np.full_like(one, 255)
    alone = engine.run(one)[0]
    for others in ([black], [white], [black, white, random_pixels(1, seed=6)]):
        assert np.array_equal(engine.run(np.concatenate([*others, one]))[-1], alone)
    together: Any = engine.session.run(None, {"pixels": np.concatenate([black, white, one])})[0]
    assert not np.array_equal(together[-1], alone), "so the engine runs images one by one"


def graph_of_products(path: Path, factor: float) -> None:
    """pixels / 255, of which one in 12,288 is multiplied by `factor`, times weights; tanh of that, times others."""
    random = np.random.default_rng(0)
    scale = np.full(12_288, 1 / 255, np.float32)
    scale[5] *= factor
    first, second = (random.normal(size=size).astype(np.float32) for size in ((12_288, 8), (8, 5)))
    first[5] = 0
    node, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    graph = onnx.helper.make_graph(
        [
            node("Cast", ["pixels"], ["numbers"], to=onnx.TensorProto.FLOAT),
            node("Reshape", ["numbers", "shape"], ["rows"]),
            node("Mul", ["rows", "scale"], ["scaled"]),
            node("MatMul", ["scaled", "first"], ["between"], name="first product"),
            node("Div", ["between", "much"], ["less"]),
            node("Tanh", ["less"], ["tame"]),
            node("MatMul", ["tame", "second"], ["logits"], name="second product"),
        ],
        "toy",
        [onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.UINT8, ["batch", 64, 64, 3])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 5])],
        [
            tensor(first, "first"),
            tensor(second, "second"),
            tensor(scale, "scale"),
            tensor(np.array([-1, 12_288]), "shape"),
            tensor(np.array(100, np.float32), "much"),
        ],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)


@pytest.mark.parametrize(("factor", "float_products"), [(1.0, []), (1e5, ["first product"])])
def test_product_with_an_outlier_input_stays_float32(
    factor: float, float_products: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = random_pixels(8, (64, 64))
    graph_of_products(tmp_path / "exact.onnx", factor)
    assert quantize_onnx_file(tmp_path / "exact.onnx", tmp_path / "a.onnx", pixels) == float_products
    assert kinds(tmp_path / "a.onnx").count("MatMul") == len(float_products)
    monkeypatch.setattr("vitrail.export.quantize.OUTLIER_RATIO", np.inf)
    assert quantize_onnx_file(tmp_path / "exact.onnx", tmp_path / "b.onnx", pixels) == []
    apart = [
        np.abs(run(tmp_path / name, pixels) - run(tmp_path / "exact.onnx", pixels)).max()
        for name in ("a.onnx", "b.onnx")
    ]
    assert apart[0] < 0.1
    assert (apart[1] > 1) == bool(float_products), "in 8 bits the others would drown"


def test_int8_export_of_an_exported_file(exported: ExportFinder, tmp_path: Path) -> None:
    """Without torch, and as good as one made with it."""
    source = exported("onnx")
    about = ExportDescription.from_json((source / CONFIG_FILE).read_text(), "here")
    write_int8_export(source / ONNX_FILE, tmp_path / "new" / "small", about, make_photo_crops(32, PREPROCESSING))
    engine = ExportedModel(tmp_path / "new" / "small")
    assert (engine.name, engine.exact, engine.description.labels) == ("int8", False, about.labels)
    assert engine.description.agreement is not None
    assert engine.description.agreement["pictures"] == 32
    inside = engine.session.get_modelmeta().custom_metadata_map[METADATA_KEY]
    told = json.loads((tmp_path / "new" / "small" / CONFIG_FILE).read_text())
    assert json.loads(inside) == {name: told[name] for name in told if name not in ("files", "checksum")}
    assert np.allclose(engine.run(random_pixels()), ExportedModel(exported("int8")).run(random_pixels()), atol=1e-5)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["small"]


def test_features_agree_by_cosine() -> None:
    a = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [np.nan, 1.0]], np.float32)
    b = np.array([[2.0, 0.1], [0.0, 1.0], [0.0, 0.0], [np.nan, 1.0]], np.float32)
    assert count_agreeing_images(a[:1], b[:1], "class") == 1, "of the same direction"
    assert count_agreeing_images(a[1:2], b[1:2], "class") == 0
    assert count_agreeing_images(a[3:], b[3:], "class") == 0
    assert count_agreeing_images(a[:2, :, None], b[:2, :, None], "tokens") == 1
    assert count_agreeing_images(a[:2], b[:2], "logits") == 1


def test_unwritable_folder_stays_empty(exported: ExportFinder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    about = ExportDescription.from_json((exported("onnx") / CONFIG_FILE).read_text(), "here")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_int8_export(
            exported("onnx") / ONNX_FILE, tmp_path / "file" / "small", about, make_photo_crops(8, PREPROCESSING)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    shutil.copytree(exported("int8"), tmp_path / "older")
    write_int8_export(exported("onnx") / ONNX_FILE, tmp_path / "older", about, make_photo_crops(8, PREPROCESSING))
    assert ExportedModel(tmp_path / "older").description.agreement == {"pictures": 8, "same": 8}
