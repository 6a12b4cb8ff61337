"""What Predictor and Explainer share: pictures as the model's input, and answers by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.preprocessing import Preprocessing, preprocess_image
from vitrail.errors import VitrailError
from vitrail.predict.predictions import ClassProbability, Prediction
from vitrail.predict.viewer import Viewer

SMALL: dict[str, Any] = {"image_size": (64, 32), "classes": 7, "depth": 1, "width": 16, "heads": 2}


def toy(**fields: Any) -> Any:
    return add_weight_noise(vitrail.create("vit_tiny_patch16_224", **{**SMALL, **fields}), std=0.3)


def picture(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pictures_become_the_models_input(dtype: torch.dtype) -> None:
    viewer = Viewer(toy().to(dtype), preprocessing=Preprocessing(crop=0.7))
    seen = viewer.see([picture(), picture(1)])
    assert seen.dtype == dtype
    assert seen.shape == (2, 3, 64, 32)
    expected = preprocess_image(open_image(picture(1)), Preprocessing(image_size=(64, 32), crop=0.7))
    assert torch.equal(seen[1], torch.from_numpy(expected).to(dtype))
    assert viewer.model(seen).shape == (2, 7)


def test_a_model_without_a_head_has_no_names() -> None:
    viewer = Viewer(toy(classes=0), preprocessing=Preprocessing(), labels=["a", "b"])
    assert viewer.labels is None
    assert viewer.classes == 0
    assert viewer.model(viewer.see([picture()])).shape == (1, 16)


def test_likeliest_classes() -> None:
    viewer = Viewer(toy(classes=3), preprocessing=Preprocessing(), labels=["x", "y, z", ""])
    first, second = viewer.likeliest(torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]]), 2)
    assert [each.index for each in first.top] == [1, 2]
    assert [each.index for each in second.top] == [0, 1]  # of equals the first
    expected = np.exp([2.0, 1.0]) / np.exp([0.0, 2.0, 1.0]).sum()
    assert [each.probability for each in first.top] == pytest.approx(expected)
    assert [each.name for each in first.top] == ["y", "class 2"]
    assert viewer.answer(0, 0.5) == ClassProbability(0, "x", 0.5)
    assert isinstance(first, Prediction)
    half = viewer.likeliest(torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.bfloat16), 3)[0]
    assert sum(each.probability for each in half.top) == pytest.approx(1)
    with pytest.raises(VitrailError, match="the model answers NaN"):
        viewer.likeliest(torch.full((1, 3), torch.nan), 1)


def test_names_of_answers() -> None:
    names = [ClassProbability(3, label, 0.5).name for label in (None, "", "tench, Tinca tinca", " a ", " , b", "a,")]
    assert names == ["class 3", "class 3", "tench", "a", "b", "a"]


def test_weights_read_in_inference_mode_still_have_gradients(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path, preprocessing=Preprocessing())
    with torch.inference_mode():
        viewer = Viewer(tmp_path)
    viewer.model(viewer.see([picture()])).sum().backward()
    assert next(viewer.model.parameters()).grad is not None
