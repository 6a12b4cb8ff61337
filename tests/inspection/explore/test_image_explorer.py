"""The figures of a photo agree with `Explainer`, for every kind of model that reads images."""

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from support.family_cases import CASES, build_case
from support.figure_files import read_figures

import vitrail
from vitrail.base.errors import ConfigError, DataError
from vitrail.data.photos import PHOTO_FOLDER
from vitrail.inspection.explain.patch_removal import predict_without_patches
from vitrail.inspection.explore.image_explorer import CHECKED_SHARE, ImageExplorer, read_removals
from vitrail.inspection.explore.image_pass import run_image_pass
from vitrail.opening import Opened, open_model

CAT = (PHOTO_FOLDER / "cat.jpg").read_bytes()
WITHOUT_ATTENTION = (
    "resnet",
    "resnet, cifar",
    "convnext",
    "regnety",
    "bit",
    "bit, Google",
    "efficientnet",
    "efficientnet, TensorFlow",
)


def open_case(case: str) -> Opened:
    return open_model(build_case(case).eval(), preprocessing={"mean": (0.5,) * 3, "std": (0.5,) * 3})


@pytest.fixture(scope="module")
def explorer() -> ImageExplorer:
    return ImageExplorer("vit_fashion", open_model("vit_fashion"))


def test_maps_and_rollout_are_those_of_the_explainer(explorer: ImageExplorer) -> None:
    _, arrays = read_figures(explorer.explore(CAT, {}))
    maps = arrays["maps"] * (arrays["scale"] / 255)[..., None]
    explainer = vitrail.Explainer("vit_fashion")
    expected = explainer.explain("example:cat", "attention", layer="all", head="all", token="class").maps
    rows = maps[:, :, 0, 1:]
    found = (rows / rows.sum(-1, keepdims=True)).reshape(expected.shape)
    assert np.abs(found - expected).max() <= 0.004 * expected.max()
    relevance = explainer.explain("example:cat", "grad-rollout", layer="all").maps[:, 0]
    np.testing.assert_allclose(arrays["relevance"], relevance, atol=1e-5)
    norms = explainer.explain("example:cat", "norms", layer="all").maps[:, 0]
    np.testing.assert_allclose(arrays["norms"], norms, rtol=1e-4)


def test_each_row_is_exact_to_two_thousandths_of_its_maximum(explorer: ImageExplorer) -> None:
    _, arrays = read_figures(explorer.explore(CAT, {}))
    tried = explorer.open_photo(CAT)
    exact = np.stack(run_image_pass(explorer.explainer, tried.pixels, gradients=False).maps)
    error = np.abs(arrays["maps"] * (arrays["scale"] / 255)[..., None] - exact).max(-1)
    assert (error <= 0.002 * exact.max(-1)).all()


def test_the_last_layer_of_the_lens_is_the_prediction(explorer: ImageExplorer) -> None:
    about, arrays = read_figures(explorer.explore(CAT, {}))
    assert arrays["lens_index"][-1, 0] == about["top"][0]["index"]
    assert arrays["lens_probability"][-1, 0] == pytest.approx(about["top"][0]["probability"], abs=1e-5)
    assert about["check"]["share"] == CHECKED_SHARE


def test_hidden_patches_change_the_prediction_as_in_the_check_of_explain(explorer: ImageExplorer) -> None:
    gone = read_removals("0.5_1.2_3", (4, 4))
    _, arrays = read_figures(explorer.explore(CAT, {"part": "hide", "hide": "0.5_1.2_3"}))
    pixels = explorer.open_photo(CAT).pixels
    for each, row in zip(gone, arrays["logits"], strict=True):
        expected = predict_without_patches(explorer.model, pixels, each[None])[0]
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)


def test_another_class_has_its_own_map(explorer: ImageExplorer) -> None:
    about, arrays = read_figures(explorer.explore(CAT, {"part": "class", "class": "3"}))
    expected = vitrail.Explainer("vit_fashion").explain("example:cat", of_class=3).map
    assert about["explained"] == 3
    np.testing.assert_allclose(arrays["relevance"][-1], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"part": "no"}, "expected all, top"),
        ({"part": "class", "class": "10"}, "expected 0 to 9"),
        ({"part": "layer", "layer": "-1"}, "expected 0 to 3"),
        ({"part": "hide", "hide": "16"}, "expected 0 to 15"),
        ({"part": "hide", "hide": ".".join(map(str, range(16)))}, "one to stay"),
        ({"part": "hide", "hide": "_".join("1" * 17)}, "at most 16"),
        ({"part": "hide", "hide": "1", "grid": "9x9"}, "expected 4x4"),
    ],
)
def test_a_wrong_request_says_what_was_expected(explorer: ImageExplorer, query: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explorer.explore(CAT, query)


def test_a_file_that_is_no_image_is_an_error(explorer: ImageExplorer) -> None:
    with pytest.raises(DataError):
        explorer.explore(b"not an image", {})


@pytest.mark.parametrize("case", [each for each in CASES if each not in WITHOUT_ATTENTION])
def test_every_model_shows_what_it_declares(case: str) -> None:
    explorer = ImageExplorer(case, open_case(case))
    described = json.loads(json.dumps(explorer.describe()))
    missing = {name for name, reason in described["parts"].items() if reason is not True}
    about, arrays = read_figures(explorer.explore(CAT, {}))
    shown = {"maps": "maps", "relevance": "relevance", "norms": "norms", "distance": "distance", "lens": "lens_index"}
    assert {part for part, name in shown.items() if name in arrays} == set(shown) - missing
    assert all(np.isfinite(each).all() for name, each in arrays.items() if name != "distance")
    if "panels" not in missing and "maps" in missing:
        assert about["panel_layers"] == [described["layers"] - 1]
    _, without = read_figures(explorer.explore(CAT, {"part": "hide", "hide": "0_1"}))
    assert without["logits"].shape == (2, 5)


@pytest.mark.parametrize("case", WITHOUT_ATTENTION)
def test_a_model_without_attention_says_why(case: str) -> None:
    with pytest.raises(ConfigError, match="no attention"):
        ImageExplorer(case, open_case(case))


def test_the_box_is_in_pixels_of_the_photo(explorer: ImageExplorer) -> None:
    stream = BytesIO()
    Image.new("RGB", (300, 200), "red").save(stream, "PNG")
    about, _ = read_figures(explorer.explore(stream.getvalue(), {"part": "top"}))
    assert about["photo"] == [200, 300]
    assert about["box"] == pytest.approx([0, 50, 200, 200], abs=1)
