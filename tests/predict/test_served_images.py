"""Models that read images, as the service runs them: what they compute is what the Predictor computes."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.encoded_images import encode_test_image
from support.toy_exports import LABELS, ExportFinder, random_pixels, save_toy_model

from vitrail.base.errors import ConfigError, DataError
from vitrail.predict.predictor import Predictor
from vitrail.predict.served_images import SERVED_LIMITS, ServedImages


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_model(tmp_path_factory.mktemp("served") / "toy")


def predict(served: ServedImages, value: Any, name: str = "image", **given: Any) -> Any:
    settings = served.parse_settings(given)
    item = served.prepare(name, value, settings)
    return served.to_json(served.run(item, [served.outputs[0].name]), settings)


@pytest.mark.parametrize("kind", ["torch", "onnx", "int8"])
def test_predictions_are_those_of_the_predictor(kind: str, toy: Path, exported: ExportFinder) -> None:
    model = str(toy if kind == "torch" else exported(kind))
    served, predictor = ServedImages(model, streams=1), Predictor(model, threads=1)
    for seed in range(3):
        photo = encode_test_image("PNG", 60 + seed, 80 - seed)
        expected = predictor.predict(photo).top
        found = predict(served, photo)
        assert [each["label"] for each in found] == [each.label for each in expected]
        assert np.allclose([each["score"] for each in found], [each.probability for each in expected], atol=1e-6)
        pixels = predictor.prepare_image(photo)
        assert predict(served, pixels, "pixels") == found
    assert served.facts["precision"] == ("int8" if kind == "int8" else "fp32")
    assert served.facts["labels"] == list(LABELS)


def test_outputs_have_the_shapes_that_are_declared(toy: Path, exported: ExportFinder) -> None:
    for model, names in (
        (toy, ["logits", "class"]),
        (exported("onnx"), ["logits"]),
        (exported("tokens"), ["tokens"]),
    ):
        served = ServedImages(str(model), streams=2)
        assert [each.name for each in served.outputs] == names
        found = served.run(random_pixels(1)[0], names)
        assert [found[each.name].shape for each in served.outputs] == [each.shape for each in served.outputs]
        assert served.features == (None if names == ["logits"] else names[-1])
    with pytest.raises(ConfigError, match="has no classes; ask for its features with /embed"):
        predict(served, served.example)


def test_parameters_are_those_of_hugging_face(toy: Path) -> None:
    served = ServedImages(str(toy), streams=1)
    assert len(predict(served, served.example, top_k="2")) == 2
    assert len(predict(served, served.example, top_k=100)) == len(LABELS)
    assert sum(each["score"] for each in predict(served, served.example)) == pytest.approx(1)
    logits = [each["score"] for each in predict(served, served.example, function_to_apply="none")]
    sigmoid = [each["score"] for each in predict(served, served.example, function_to_apply="sigmoid")]
    assert np.allclose(1 / (1 + np.exp(-np.array(logits))), sigmoid)
    for given, message in (
        ({"top": 1}, "unknown parameter 'top'; expected top_k or function_to_apply"),
        ({"top_k": "0"}, "top_k is 0; expected a number of classes, 1 or more"),
        ({"top_k": [1]}, "top_k is .*; expected"),
        ({"function_to_apply": "tanh"}, "function_to_apply is 'tanh'; expected softmax, sigmoid, none"),
    ):
        with pytest.raises(ConfigError, match=message):
            served.parse_settings(given)


def test_other_formats_and_sizes_than_in_the_list_are_refused(toy: Path) -> None:
    served = ServedImages(str(toy), streams=1)
    assert SERVED_LIMITS.pixels is not None
    large = io.BytesIO()
    Image.new("L", (5001, 5000)).save(large, "PNG")
    for photo, message in (
        (encode_test_image("TIFF", 8, 8), "is a TIFF file; expected JPEG, PNG, WebP, GIF or BMP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "is a PostScript file; expected JPEG"),
        (large.getvalue(), "is 5000×5001 pixels; expected at most 25000000"),
    ):
        with pytest.raises(DataError, match=message):
            predict(served, photo)


def test_streams_have_one_thread_and_latency_has_all(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.predict.served_images.count_cores", lambda: 3)
    cases: list[tuple[dict[str, Any], tuple[int, int]]]
    cases = [({}, (3, 1)), ({"streams": 2}, (2, 1)), ({"latency": True}, (1, 3))]
    for options, expected in cases:
        served = ServedImages(str(toy), **options)
        assert (served.streams, served.predictor.engine.threads) == expected
    with pytest.raises(ConfigError, match="`latency` with `streams` 2"):
        ServedImages(str(toy), streams=2, latency=True)
    with pytest.raises(ConfigError, match="`streams` 0; expected 1 or more"):
        ServedImages(str(toy), streams=0)


def return_nan(*_: Any) -> NDArray[np.float32]:
    return np.array([np.nan, 1], np.float32)


def test_what_is_not_finite_is_an_error(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = ServedImages(str(toy), streams=1)
    monkeypatch.setattr(ServedImages, "compute", return_nan)
    with pytest.raises(DataError, match="the model returns NaN"):
        predict(served, served.example)
