"""A picture goes in and the classes come out that the model gives by hand."""

import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.fake_notebook import FakeNotebook
from support.noisy_weights import add_weight_noise
from support.toy_exports import ExportFinder

import vitrail
from vitrail.base import progress
from vitrail.base.errors import CheckpointError, ConfigError, DataError, VitrailError
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.predict.predictor import Predictor

PREPROCESSING = Preprocessing(image_size=(64, 32), crop=0.8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
LABELS = [f"class {n}" for n in range(7)]


def toy(**fields: Any) -> Any:
    fields = {"image_size": (64, 32), "classes": 7, "depth": 2, "width": 16, "heads": 2, **fields}
    return add_weight_noise(vitrail.create("vit_tiny_patch16_224", **fields), std=0.3)


def picture(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def by_hand(model: Any, image: Any, preprocessing: Preprocessing = PREPROCESSING) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(preprocess_image(open_image(image), preprocessing))[None]).softmax(-1)[0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    vitrail.save(toy(), tmp_path / "model", preprocessing=PREPROCESSING, labels=LABELS)
    return tmp_path / "model"


def test_a_folder_answers_as_its_model(saved: Path) -> None:
    predictor = vitrail.Predictor(saved)
    found = predictor.predict(picture())
    expected = by_hand(vitrail.load(saved).eval(), picture())
    assert len(found.top) == 5
    assert [each.index for each in found.top] == expected.argsort(descending=True)[:5].tolist()
    for each in found.top:
        assert each.label == f"class {each.index}"
        assert each.probability == pytest.approx(expected[each.index].item(), abs=1e-6)
    assert sum(each.probability for each in predictor.predict(picture(), top=99).top) == pytest.approx(1)
    assert len(predictor.predict(picture(), top=99).top) == 7


def test_a_picture_of_any_kind(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(picture()).save(path)
    predictor = Predictor(str(saved))
    tensor = torch.from_numpy(picture()).permute(2, 0, 1)
    answers = [predictor.predict(source) for source in (path, str(path), path.read_bytes(), Image.open(path), tensor)]
    assert answers == [predictor.predict(picture())] * 5


def test_a_module_with_its_preprocessing() -> None:
    model = toy().train()
    predictor = Predictor(model, preprocessing=PREPROCESSING)
    assert not model.training
    found = predictor.predict(picture(), top=1).top[0]
    assert found.label is None
    assert found.probability == pytest.approx(by_hand(model, picture()).max().item(), abs=1e-6)
    assert Predictor(model, preprocessing=PREPROCESSING, labels=LABELS).predict(picture(), 1).top[0].label is not None


def test_what_is_given_goes_before_what_is_saved(saved: Path) -> None:
    other = Preprocessing(image_size=(64, 32), fit="squash")
    predictor = Predictor(saved, preprocessing=other, labels=[*"abcdefg"])
    found = predictor.predict(picture(), 1).top[0]
    assert found.label == "abcdefg"[found.index]
    expected = by_hand(vitrail.load(saved).eval(), picture(), other)
    assert found.probability == pytest.approx(expected.max().item(), abs=1e-6)


def test_the_size_is_the_models_unless_it_takes_any() -> None:
    large = Preprocessing(image_size=(96, 96))
    assert Predictor(toy(), preprocessing=large).preprocessing.image_size == (64, 32)
    assert Predictor(toy(dynamic=True), preprocessing=large).preprocessing.image_size == (96, 96)
    Predictor(toy(dynamic=True), preprocessing=large).predict(picture())


def test_one_channel() -> None:
    gray = Preprocessing(mean=(0.5,), std=(0.5,))
    assert len(Predictor(toy(channels=1), preprocessing=gray).predict(picture()).top) == 5


def test_half_precision() -> None:
    model = toy()
    expected = by_hand(model, picture()).max().item()
    found = Predictor(model.bfloat16(), preprocessing=PREPROCESSING).predict(picture()).top[0]
    assert found.probability == pytest.approx(expected, abs=0.02)


def test_a_compiled_model() -> None:
    model = toy()
    compiled: Any = torch.compile(model, backend="eager")
    found = Predictor(compiled, preprocessing=PREPROCESSING).predict(picture())
    assert found == Predictor(model, preprocessing=PREPROCESSING).predict(picture())


def test_equal_classes_come_in_order() -> None:
    untrained = vitrail.create("vit_tiny_patch16_224", image_size=32, depth=1, width=16, heads=2, classes=9)
    found = Predictor(untrained, preprocessing=Preprocessing()).predict(picture())
    assert [(each.index, each.probability) for each in found.top] == [(n, pytest.approx(1 / 9)) for n in range(5)]


def test_a_stream_of_pictures_is_taken_a_batch_at_a_time(saved: Path) -> None:
    taken = 0

    def endless() -> Iterator[np.ndarray[Any, Any]]:
        nonlocal taken
        for taken in itertools.count(1):
            yield picture(taken)

    predictor = Predictor(saved)
    answers = predictor.predict_all(endless(), batch=3, top=2)
    assert taken == 0
    first = list(itertools.islice(answers, 4))
    assert taken == 12, "the batch asked for, and three that two workers are at or have at hand"
    for number, each in enumerate(first, 1):
        alone = predictor.predict(picture(number), top=2)
        assert [a.index for a in each.top] == [a.index for a in alone.top]
        assert each.top[0].probability == pytest.approx(alone.top[0].probability, abs=1e-5)
    assert list(predictor.predict_all([])) == []
    assert len(list(predictor.predict_all(np.stack([picture()] * 5), batch=2))) == 5


def test_missing_preprocessing_is_assumed_with_a_warning(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    for model in (tmp_path, toy()):
        with pytest.warns(UserWarning, match="does not specify preprocessing; assumed preprocessing=mean 0.5"):
            assert Predictor(model).preprocessing == Preprocessing(image_size=(64, 32))
    assert Predictor(tmp_path, preprocessing=PREPROCESSING).predict(picture()).top


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Predictor(toy(classes=0), preprocessing=PREPROCESSING, output="logits"), "no head"),
        (lambda: Predictor(toy(), preprocessing=PREPROCESSING, engine="onx"), "did you mean 'onnx'"),  # pyright: ignore[reportArgumentType]
        (lambda: Predictor(toy(), preprocessing=PREPROCESSING, output="token"), "did you mean 'tokens'"),  # pyright: ignore[reportArgumentType]
        (lambda: Predictor(torch.nn.Linear(2, 2), preprocessing=PREPROCESSING), "Linear has no config"),
        (lambda: Predictor(toy(), preprocessing={"corp": 1}), "unknown preprocessing field 'corp'"),
        (lambda: Predictor(toy(channels=1), preprocessing=PREPROCESSING), "has 3 channels; expected 1"),
        (lambda: Predictor(toy(), preprocessing=PREPROCESSING, labels=["a"]), "1 labels for 7 classes"),
        (lambda: Predictor(toy(), preprocessing=PREPROCESSING, labels="abcdefg"), "expected a list of strings"),
        (lambda: Predictor(toy(), preprocessing=PREPROCESSING, device="toaster"), "toaster is not a device"),
        (lambda: Predictor("no/such/folder"), "does not exist"),
        (lambda: Predictor(7), "the model is 7; expected a name, a path"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_predict_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 2.0, "3", True, None])
def test_counts_are_whole_numbers(saved: Path, count: Any) -> None:
    predictor = Predictor(saved)
    with pytest.raises(ConfigError, match="`top` is"):
        predictor.predict(picture(), top=count)
    with pytest.raises(ConfigError, match="`top` is"):
        predictor.predict_all([], top=count)
    with pytest.raises(ConfigError, match="`batch` is"):
        predictor.predict_all([], batch=count)


def test_one_picture_is_not_several(saved: Path) -> None:
    one: list[Any] = ["a.jpg", Path("a.jpg"), b"bytes", picture(), Image.fromarray(picture()), 7]
    for source in one:
        with pytest.raises(ConfigError, match="expected several"):
            Predictor(saved).predict_all(source)


def test_broken_pictures_and_broken_weights(saved: Path) -> None:
    predictor = Predictor(saved)
    with pytest.raises(DataError, match=r"'none\.jpg' does not exist"):
        predictor.predict("none.jpg")
    with torch.no_grad():
        next(predictor.model.parameters()).fill_(float("nan"))
    for ask in (predictor.predict, predictor.features):
        with pytest.raises(VitrailError, match="the model returns NaN"):
            ask(picture())


def features_by_hand(model: Any, image: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.tokens(torch.from_numpy(preprocess_image(open_image(image), PREPROCESSING))[None])[0]


def test_features_are_the_tokens_after_the_last_norm(saved: Path) -> None:
    predictor = Predictor(saved)
    tokens = features_by_hand(vitrail.load(saved).eval(), picture())
    expected = {None: tokens[0], "class": tokens[0], "mean": tokens[1:].mean(0), "tokens": tokens}
    for kind, values in expected.items():
        found = predictor.features(picture(), kind)  # pyright: ignore[reportArgumentType]
        assert (type(found), found.dtype) == (np.ndarray, np.float32)
        np.testing.assert_allclose(found, values, atol=1e-5)
    assert predictor.predict(picture()).top[0].label is not None, "it still predicts classes"
    several = predictor.features_all([picture(), picture(1), picture(2)], batch=2)
    assert several.shape == (3, 16)
    np.testing.assert_allclose(several[2], predictor.features(picture(2)), atol=1e-5)


def test_features_of_a_model_without_a_class_token_are_the_mean() -> None:
    model = toy(class_token=False, pool="mean")
    found = Predictor(model, preprocessing=PREPROCESSING).features(picture())
    np.testing.assert_allclose(found, features_by_hand(model, picture()).mean(0), atol=1e-5)


def test_a_predictor_of_features_keeps_its_kind(saved: Path) -> None:
    predictor = Predictor(saved, output="mean")
    assert np.array_equal(predictor.features(picture()), Predictor(saved).features(picture(), "mean"))
    with pytest.raises(ConfigError, match="computes features, mean; expected output='logits'"):
        predictor.predict(picture())


def test_a_model_without_a_head_has_features_only() -> None:
    predictor = Predictor(toy(classes=0), preprocessing=PREPROCESSING)
    assert predictor.features(picture()).shape == (16,)
    for ask in (lambda: predictor.predict(picture()), lambda: predictor.predict_all([picture()])):
        with pytest.raises(ConfigError, match="has no head, so it has no classes"):
            ask()


def test_an_export_has_the_features_that_it_was_written_with(exported: ExportFinder) -> None:
    with pytest.raises(ConfigError, match="returns logits; expected class: export the model with `features` class"):
        Predictor(exported("onnx")).features(picture())
    tokens = Predictor(exported("tokens"))
    assert tokens.features(picture()).shape == (8, 16)
    with pytest.raises(ConfigError, match="returns tokens; expected mean"):
        tokens.features(picture(), "mean")


def test_wrong_arguments_of_features(saved: Path) -> None:
    predictor: Any = Predictor(saved)
    with pytest.raises(ConfigError, match="unknown kind of features 'cls'"):
        predictor.features(picture(), "cls")
    with pytest.raises(ConfigError, match="expected several"):
        predictor.features_all("photo.jpg")
    with pytest.raises(ConfigError, match="no images"):
        predictor.features_all([])


def test_a_loaded_model_is_not_loaded_again_and_may_get_other_settings(saved: Path) -> None:
    loaded = vitrail.open_model(saved)
    predictor = Predictor(loaded)
    assert predictor.model is loaded.model
    assert vitrail.Explainer(predictor).model is loaded.model
    other = Predictor(loaded, labels=[*"abcdefg"], preprocessing={"crop": 1.0})
    assert (other.model is loaded.model, other.preprocessing.crop, other.labels) == (True, 1.0, (*"abcdefg",))
    assert (loaded.preprocessing.crop, loaded.labels) == (0.8, tuple(LABELS))
    with pytest.raises(ConfigError, match=r"heads=… for .*, which is already loaded"):
        Predictor(loaded, fields={"heads": 2})


def test_two_predictors_of_an_export_have_their_own_streams(exported: ExportFinder) -> None:
    loaded = vitrail.open_model(exported("onnx"), threads=1)
    one, two = Predictor(loaded), Predictor(loaded, streams=2)
    assert (one.engine.streams, two.engine.streams) == (1, 2)
    assert one.predict(picture()) == two.predict(picture())


def test_the_reprs_are_short(saved: Path) -> None:
    line = repr(Predictor(saved))
    assert "\n" not in line
    for word in ("7 classes: class 0", "64×32 pixels", " parameters", "ViT", "engine eager"):
        assert word in line


def test_many_images_show_progress_in_a_notebook(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = FakeNotebook.install(monkeypatch)
    monkeypatch.setattr(progress, "MIN_SECONDS", 0)
    predictor = Predictor(saved)
    assert len(list(predictor.predict_all([picture()] * 5))) == 5
    assert "5/5" in "".join(notebook.shown)
    shown = len(notebook.shown)
    list(predictor.predict_all([picture()] * 5, progress=False))
    assert len(notebook.shown) == shown


REAL: dict[str, tuple[str, str, Preprocessing]] = {
    "vit_tiny_augreg": (
        "vit_tiny_patch16_224",
        "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
        Preprocessing(crop=0.875),
    ),
    "deit_tiny": (
        "deit_tiny_patch16_224",
        "weights/deit_tiny_patch16_224.pth",
        Preprocessing(crop=0.875, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ),
}


@pytest.mark.parametrize("key", REAL)
def test_public_weights_name_what_is_on_real_photos(key: str, shared: Callable[[str], Path], tmp_path: Path) -> None:
    name, weights, preprocessing = REAL[key]
    path, folder = shared(weights), shared("imagenet-val-1000")
    names = [line.split(" ", 1)[1] for line in shared("imagenet-classes.txt").read_text("utf-8").splitlines()]
    with shared("imagenet-val-1000-reference.csv").open() as file:
        rows = list(csv.DictReader(file))[::100]
    model = vitrail.create(name)
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)["model"]
    model.load_state_dict(tensors)
    vitrail.save(model, tmp_path, preprocessing=preprocessing, labels=names)
    answers = Predictor(tmp_path).predict_all(folder / row["file"] for row in rows)
    for row, found in zip(rows, answers, strict=True):
        assert [each.index for each in found.top] == [int(index) for index in row[f"{key}_top5"].split()]
        assert found.top[0].label == names[found.top[0].index]
        assert found.top[0].probability == pytest.approx(float(row[f"{key}_p1"]), abs=1e-3)
