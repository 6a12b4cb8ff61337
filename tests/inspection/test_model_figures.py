"""All that can be seen of a model: of every family, with pictures and without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise
from support.toy_datasets import random_array, write_image

import vitrail
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.inspection.attention_distance import attention_distance
from vitrail.inspection.capture import capture_attention
from vitrail.inspection.explain import Explainer
from vitrail.inspection.explain_options import ExplainOptions
from vitrail.inspection.model_figures import OCCLUSION_SHARES, look
from vitrail.inspection.patch_removal import probabilities_without_patches
from vitrail.loading import open_module

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

TOY: dict[str, Any] = {"image_size": 32, "depth": 2, "width": 16, "heads": 2, "classes": 3}
MOVING = ("attention_distance", "token_norms")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"image_size": (32, 48), "patch_size": 8}),
    "mean": ("vit_tiny_patch16_224", {"class_token": False, "pool": "mean"}),
    "map": ("vit_tiny_patch16_224", {"class_token": False, "pool": "map"}),
    "registers": ("vit_tiny_patch16_224", {"registers": 3, "positions": "rotary"}),
    "relative": ("vit_tiny_patch16_224", {"positions": "relative", "patch_size": 8}),
    "grey": ("vit_tiny_patch16_224", {"channels": 1, "patch_size": 8}),
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


def names(seen: Any) -> list[str]:
    return [plate.name for plate in seen.figures]


@pytest.mark.parametrize("kind", MODELS)
def test_every_family(kind: str) -> None:
    subject = explainer(kind)
    seen = look(subject, photos(5), batch=2)
    expected = {"filters", *MOVING, "alignment"}
    expected |= {"position_similarity"} if kind not in ("registers", "relative") else set()
    expected |= {"token_similarity"} if kind == "distilled" else set()
    expected |= {"occlusion"} if kind != "headless" else set()
    assert set(names(seen)) == expected
    assert len(names(seen)) == len(expected)
    assert seen.images == 5
    assert seen.skipped == ()
    missing = {"position similarity": "position_similarity", "occlusion check": "occlusion"}
    assert [note.split(":")[0] for note in seen.notes] == [k for k, name in missing.items() if name not in expected]
    (h, w), prefix = subject.model.grid, getattr(subject.model, "prefix", 0)
    assert seen["attention_distance"].arrays["distances"].shape == (2, 2)
    assert seen["token_norms"].arrays["norms"].shape == (3, 5, prefix + h * w)
    assert seen["alignment"].arrays["alignment"].shape == (3, 3)
    for plate in seen.figures:
        for values in plate.arrays.values():
            assert np.isfinite(values).all(), plate.name


def test_every_plate_has_its_units() -> None:
    units = {
        "position_similarity": "cosine",
        "filters": "component, from 0: share of the filters' variance (%)",
        "attention_distance": "distance (pixels)",
        "token_norms": "norm of a token",
        "token_similarity": "cosine",
        "alignment": "linear CKA",
        "occlusion": "patches removed (%)",
    }
    seen = look(explainer("distilled"), photos(4))
    assert set(names(seen)) == set(units)
    for plate in seen.figures:
        figure = plate.draw()
        texts = [text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())]
        assert units[plate.name] in (*texts, figure.get_supxlabel())
        assert plate.caption.endswith(".")


def test_distances_are_those_of_the_captured_maps() -> None:
    subject, pictures = explainer("registers"), photos(3)
    with torch.no_grad(), capture_attention(subject.model) as seen:
        subject.model.tokens(subject.loaded.make_batch(pictures))
    by_hand = np.stack([attention_distance(each.numpy(), (2, 2), (16, 16)) for each in seen.maps], axis=1).mean(0)
    found = look(subject, pictures, batch=2)["attention_distance"]
    np.testing.assert_allclose(found.arrays["distances"], by_hand, rtol=1e-5)
    assert "3 images of 32×32 pixels" in found.caption
    assert 0 < by_hand.min() < by_hand.max() < 16 * 2**0.5 * 2


@pytest.mark.parametrize("kind", ["distilled", "cct"])
def test_numbers_do_not_depend_on_the_batch(kind: str) -> None:
    subject = explainer(kind)
    one, three, all_ = (look(subject, photos(5), batch=batch) for batch in (1, 3, 99))
    for plate in one.figures:
        for name, values in plate.arrays.items():
            for other in (three, all_):
                np.testing.assert_allclose(other[plate.name].arrays[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_no_more_than_a_batch_is_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_pictures_that_cannot_be_read(tmp_path: Path) -> None:
    good = [write_image(tmp_path / f"{n}.png", n) for n in range(4)]
    bad = tmp_path / "broken.png"
    bad.write_bytes(b"no picture")
    pictures = [good[0], bad, good[1], tmp_path / "nowhere.png", *good[2:]]
    progress = list[int]()
    seen, without = look(explainer(), pictures, batch=3, progress=progress.append), look(explainer(), good)
    assert seen.images == 4
    assert len(seen.skipped) == 2
    assert "broken.png' is not an image" in seen.skipped[0]
    assert "nowhere.png' does not exist" in seen.skipped[1]
    assert sum(progress) == 6
    for plate in without.figures:
        for name, values in plate.arrays.items():
            np.testing.assert_allclose(seen[plate.name].arrays[name], values, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match=r"no picture to look at; 1 cannot be read, for instance .*broken\.png' is no"):
        look(explainer(), [bad])


@pytest.mark.parametrize("kind", ["vit", "headless"])
def test_weights_that_are_not_finite(kind: str) -> None:
    subject = explainer(kind)
    subject.model.blocks[0].mlp.fc1.weight.data[0, 0] = torch.nan
    with pytest.raises(VitrailError, match=r"^the model returns NaN; expected finite weights"):
        look(subject, photos(1))
    with pytest.raises(VitrailError, match=r"^the model returns NaN; expected finite weights"):
        subject.explain(photos(1)[0])


def test_without_pictures() -> None:
    seen = look(explainer())
    assert names(seen) == ["position_similarity", "filters"]
    assert seen.images == 0
    assert seen.notes == (
        "no pictures were shown: attention distance, tokens, alignment and the occlusion check need some",
    )


def test_few_pictures() -> None:
    seen = look(explainer(), photos(1))
    assert "alignment" not in names(seen)
    assert {*MOVING, "occlusion"} <= set(names(seen))
    assert "alignment of the layers: too few pictures, 1; expected 4 or more" in seen.notes


def test_how_probable_a_class_stays() -> None:
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


def test_the_check_of_another_method() -> None:
    subject = explainer("map")
    rollout, pool = (look(subject, photos(2), options=each) for each in (None, ExplainOptions(method="pool")))
    assert not np.allclose(rollout["occlusion"].arrays["most"], pool["occlusion"].arrays["most"])
    np.testing.assert_allclose(rollout["occlusion"].arrays["chance"], pool["occlusion"].arrays["chance"])
    graded = look(subject, photos(2), options=ExplainOptions(method="grad-rollout", of_class=1))
    assert graded["occlusion"].arrays["most"].shape == (2, len(OCCLUSION_SHARES))
    with pytest.raises(ConfigError, match=r"^layer 2; expected 0 to 1, "):
        look(subject, options=ExplainOptions(method="attention", layer=2))


def test_the_model_is_left_as_it_was() -> None:
    subject = explainer()
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    look(subject, photos(2))
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^batch is 0; expected 1 or more$"):
        look(explainer(), batch=0)
    with pytest.raises(ConfigError, match=r"^unknown plate 'filter'; did you mean 'filters'\?$"):
        _ = look(explainer())["filter"]
    how = vitrail.Preprocessing(image_size=32)
    convnet = vitrail.create("resnet18", image_size=32, stages=(1, 1), width=8, classes=2)
    vitrail.save(convnet, tmp_path / "convnet", preprocessing=how)
    with pytest.raises(ConfigError, match=r"^ResNet has no attention to look at; expected a transformer"):
        look(tmp_path / "convnet")
    assert open_module(tmp_path / "convnet").classes == 2, "only its attention is missing"


def test_a_folder_and_a_model_are_looked_at_alike(tmp_path: Path) -> None:
    subject = explainer()
    vitrail.save(subject.model, tmp_path / "model", preprocessing=subject.loaded.preprocessing)
    one, two = look(tmp_path / "model", photos(2)), look(subject, photos(2))
    np.testing.assert_allclose(one["occlusion"].arrays["most"], two["occlusion"].arrays["most"], rtol=1e-5)
