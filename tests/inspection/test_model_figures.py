"""All figures of a model: of every family, with and without images."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise
from support.toy_datasets import random_array, write_image

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.inspection.attention.attention_distance import attention_distance
from vitrail.inspection.attention.capture import capture_attention
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.patch_removal import probabilities_without_patches
from vitrail.inspection.model_figures import OCCLUSION_SHARES, look
from vitrail.opening import open_torch_model

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

TOY: dict[str, Any] = {"image_size": 32, "depth": 2, "width": 16, "heads": 2, "classes": 3}
MOVING = ("attention_distance", "token_norms")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"image_size": (32, 48), "patch_size": 8}),
    "mean": ("vit_tiny_patch16_224", {"class_token": False, "pool": "mean"}),
    "map": ("vit_tiny_patch16_224", {"class_token": False, "pool": "map"}),
    "registers": ("vit_tiny_patch16_224", {"registers": 3, "positions": "rotary"}),
    "relative": ("vit_tiny_patch16_224", {"positions": "relative", "patch_size": 8}),
    "gray": ("vit_tiny_patch16_224", {"channels": 1, "patch_size": 8}),
    "deit": ("deit_tiny_patch16_224", {"patch_size": 8}),
    "distilled": ("deit_tiny_distilled_patch16_224", {"patch_size": 8}),
    "deit3": ("deit3_small_patch16_224", {}),
    "hybrid": ("vit_tiny_r_s16_p8_224", {}),
    "cct": ("cct_2_3x2_32", {}),
    "headless": ("vit_tiny_patch16_224", {"classes": 0}),
}


def explainer(kind: str = "vit", **changes: Any) -> Explainer:
    torch.manual_seed(0)
    preset, fields = MODELS[kind]
    model = add_weight_noise(vitrail.create(preset, **TOY | fields | changes), std=0.3)
    spread = (0.5,) * model.config.channels
    return Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32, mean=spread, std=spread))


def photos(count: int) -> list[Any]:
    return [random_array(40, 56, 3, seed=number) for number in range(count)]


def names(result: Any) -> list[str]:
    return [captioned.name for captioned in result.figures]


@pytest.mark.parametrize("kind", MODELS)
def test_every_family(kind: str) -> None:
    subject = explainer(kind)
    result = look(subject, photos(5), batch=2)
    expected = {"filters", *MOVING, "alignment", "patch_pca"}
    expected |= {"position_similarity"} if kind not in ("registers", "relative") else set()
    expected |= {"token_similarity"} if kind == "distilled" else set()
    expected |= {"occlusion"} if kind != "headless" else set()
    assert set(names(result)) == expected
    assert len(names(result)) == len(expected)
    assert result.images == 5
    assert result.skipped == ()
    missing = {"position similarity": "position_similarity", "occlusion check": "occlusion"}
    assert [note.split(":")[0] for note in result.notes] == [k for k, name in missing.items() if name not in expected]
    (h, w), prefix = subject.model.grid, getattr(subject.model, "prefix", 0)
    assert result["attention_distance"].arrays["distances"].shape == (2, 2)
    assert result["token_norms"].arrays["norms"].shape == (3, 5, prefix + h * w)
    assert result["alignment"].arrays["alignment"].shape == (3, 3)
    for captioned in result.figures:
        for values in captioned.arrays.values():
            assert np.isfinite(values).all(), captioned.name


def test_every_figure_has_units() -> None:
    units = {
        "position_similarity": "cosine similarity",
        "filters": "principal component: share of the filters' variance",
        "attention_distance": "distance (pixels)",
        "token_norms": "token norm",
        "token_similarity": "cosine similarity",
        "alignment": "linear CKA",
        "occlusion": "patches removed (%)",
        "patch_pca": "",  # colors without a unit
    }
    result = look(explainer("distilled"), photos(4))
    assert set(names(result)) == set(units)
    for captioned in result.figures:
        figure = captioned.draw()
        texts = [text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())]
        assert units[captioned.name] in (*texts, figure.get_supxlabel())
        assert captioned.caption.endswith(".")


def test_distances_match_the_captured_maps() -> None:
    subject, images = explainer("registers"), photos(3)
    with torch.no_grad(), capture_attention(subject.model) as result:
        subject.model.tokens(subject.loaded.make_batch(images))
    by_hand = np.stack([attention_distance(each.numpy(), (2, 2), (16, 16)) for each in result.maps], axis=1).mean(0)
    found = look(subject, images, batch=2)["attention_distance"]
    np.testing.assert_allclose(found.arrays["distances"], by_hand, rtol=1e-5)
    assert "3 images of 32×32 pixels" in found.caption
    assert 0 < by_hand.min() < by_hand.max() < 16 * 2**0.5 * 2


@pytest.mark.parametrize("kind", ["distilled", "cct"])
def test_numbers_do_not_depend_on_the_batch(kind: str) -> None:
    subject = explainer(kind)
    one, three, all_ = (look(subject, photos(5), batch=batch) for batch in (1, 3, 99))
    for captioned in one.figures:
        for name, values in captioned.arrays.items():
            for other in (three, all_):
                np.testing.assert_allclose(
                    other[captioned.name].arrays[name], values, rtol=1e-4, atol=1e-5, err_msg=name
                )


def test_at_most_one_batch_of_images_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, taken, held, progress = explainer(), [0], list[int](), list[int]()
    plain = subject.model.tokens

    def counted() -> Iterator[Any]:
        for each in photos(8):
            taken[0] += 1
            yield each

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        held.append(taken[0])
        assert len(pixels) <= 3
        return plain(pixels)

    monkeypatch.setattr(subject.model, "tokens", tokens)
    assert look(subject, counted(), batch=3, progress=progress.append).images == 8
    assert held == [3, 6, 8]
    assert progress == [1] * 8


def test_unreadable_images_are_skipped(tmp_path: Path) -> None:
    good = [write_image(tmp_path / f"{n}.png", n) for n in range(4)]
    bad = tmp_path / "broken.png"
    bad.write_bytes(b"not an image")
    images = [good[0], bad, good[1], tmp_path / "nowhere.png", *good[2:]]
    progress = list[int]()
    result, without = look(explainer(), images, batch=3, progress=progress.append), look(explainer(), good)
    assert result.images == 4
    assert len(result.skipped) == 2
    assert "broken.png' is not an image" in result.skipped[0]
    assert "nowhere.png' does not exist" in result.skipped[1]
    assert sum(progress) == 6
    for captioned in without.figures:
        for name, values in captioned.arrays.items():
            np.testing.assert_allclose(result[captioned.name].arrays[name], values, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match=r"none of the 1 images can be read, for instance: .*broken\.png' is no"):
        look(explainer(), [bad])


@pytest.mark.parametrize("kind", ["vit", "headless"])
def test_weights_of_nan_are_an_error(kind: str) -> None:
    subject = explainer(kind)
    subject.model.blocks[0].mlp.fc1.weight.data[0, 0] = torch.nan
    with pytest.raises(VitrailError, match=r"^the model returns NaN; expected finite weights"):
        look(subject, photos(1))
    with pytest.raises(VitrailError, match=r"^the model returns NaN; expected finite weights"):
        subject.explain(photos(1)[0])


def test_without_images() -> None:
    result = look(explainer())
    assert names(result) == ["position_similarity", "filters"]
    assert result.images == 0
    assert result.notes == (
        "no images were given: attention distance, tokens, CKA, occlusion and patch features need some",
    )


def test_few_images() -> None:
    result = look(explainer(), photos(1))
    assert "alignment" not in names(result)
    assert {*MOVING, "occlusion"} <= set(names(result))
    assert "similarity of layers: 4 images or more are needed, not 1" in result.notes


def test_probabilities_of_the_occlusion_check() -> None:
    subject = explainer()
    pixels = subject.loaded.make_batch(photos(3))
    with torch.no_grad():
        plain = subject.model(pixels).softmax(-1)
    classes, attended = plain.argmax(-1), np.random.default_rng(0).random((3, *subject.model.grid))
    for most in (True, False):
        found = probabilities_without_patches(subject.model, pixels, attended, classes, (0.0, 0.5), most=most)
        assert found.shape == (3, 2)
        np.testing.assert_allclose(found[:, 0], plain.max(-1).values, rtol=1e-5)
    curves = look(subject, photos(3))["occlusion"].arrays
    assert curves["shares"].tolist() == list(OCCLUSION_SHARES)
    for name in ("most", "least", "chance"):
        np.testing.assert_allclose(curves[name][:, 0], plain.max(-1).values, rtol=1e-5)
        assert len(np.unique(curves[name][:, 3])) == 3
    assert not np.allclose(curves["most"], curves["least"])


def test_occlusion_check_of_another_method() -> None:
    subject = explainer("map")
    rollout, pool = (look(subject, photos(2), options=each) for each in (None, ExplainOptions(method="pool")))
    assert not np.allclose(rollout["occlusion"].arrays["most"], pool["occlusion"].arrays["most"])
    np.testing.assert_allclose(rollout["occlusion"].arrays["chance"], pool["occlusion"].arrays["chance"])
    graded = look(subject, photos(2), options=ExplainOptions(method="grad-rollout", of_class=1))
    assert graded["occlusion"].arrays["most"].shape == (2, len(OCCLUSION_SHARES))
    with pytest.raises(ConfigError, match=r"^layer is 2; expected 0 to 1, "):
        look(subject, options=ExplainOptions(method="attention", layer=2))


def test_model_is_not_changed() -> None:
    subject = explainer()
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    look(subject, photos(2))
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    kept = [
        vars(module)[name] for module in subject.model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")
    ]
    assert not any(kept)
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`batch` is 0; expected 1 or more"):
        look(explainer(), batch=0)
    with pytest.raises(ConfigError, match=r"^unknown figure 'filter'; did you mean 'filters'\?$"):
        _ = look(explainer())["filter"]
    how = vitrail.Preprocessing(image_size=32)
    convnet = vitrail.create("resnet18", image_size=32, stages=(1, 1), width=8, classes=2)
    vitrail.save(convnet, tmp_path / "convnet", preprocessing=how)
    with pytest.raises(ConfigError, match=r"^ResNet has no attention maps: it has no attention; expected"):
        look(tmp_path / "convnet")
    assert open_torch_model(tmp_path / "convnet").classes == 2, "only its attention is missing"


def test_folder_and_model_give_the_same_figures(tmp_path: Path) -> None:
    subject = explainer()
    vitrail.save(subject.model, tmp_path / "model", preprocessing=subject.loaded.preprocessing)
    one, two = look(tmp_path / "model", photos(2)), look(subject, photos(2))
    np.testing.assert_allclose(one["occlusion"].arrays["most"], two["occlusion"].arrays["most"], rtol=1e-5)
