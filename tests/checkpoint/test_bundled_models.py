"""Models inside the package: small, described in the README next to them, as accurate as it says, opened by name."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from vitrail.base.errors import CheckpointError, CheckpointWarning
from vitrail.checkpoint.weight_folders import BUNDLED_FOLDER, find_bundled_model, list_bundled_models
from vitrail.data.text.batches import EncodedPairs
from vitrail.data.text.pairs import SentencePairs
from vitrail.evaluation.checkpoint_evaluation import open_checkpoint_evaluation
from vitrail.evaluation.evaluation_data import find_default_data
from vitrail.evaluation.text_evaluation import open_text_evaluation
from vitrail.inspection.attention.attention_distance import uniform_attention_distance
from vitrail.inspection.representation.weight_patterns import compare_near_and_far
from vitrail.predict.model_checksums import compute_model_checksums, identify_model

NAMES = list(list_bundled_models())
TRANSLATOR = "transformer_tatoeba"
IMAGE_MODELS = [name for name in NAMES if name != TRANSLATOR]
README = (BUNDLED_FOLDER / "README.md").read_text("utf-8")
MAX_BYTES = 6_000_000  # of all models together


def get_section(name: str) -> str:
    """The section of the README about a model."""
    return re.split(r"^## ", README, flags=re.MULTILINE)[1 + README_NAMES.index(name)]


README_NAMES = re.findall(r"^## (\w+)$", README, re.MULTILINE)


def test_models_are_small_and_complete() -> None:
    assert NAMES == ["cct_cifar10", "transformer_tatoeba", "vit_cifar10", "vit_fashion"]
    assert sum(path.stat().st_size for path in BUNDLED_FOLDER.rglob("*") if path.is_file()) <= MAX_BYTES
    for name in NAMES:
        files = {path.name for path in (BUNDLED_FOLDER / name).iterdir()}
        assert files == {"config.json", "model.safetensors", *(["tokenizer.json"] if name == TRANSLATOR else [])}


def test_the_readme_says_how_each_was_made() -> None:
    assert sorted(README_NAMES) == NAMES
    for name in NAMES:
        section = get_section(name)
        assert re.search(r"^    vitrail (train|distill) .*?--seed \d+", section, re.DOTALL | re.M), "its command"
        assert re.search(r"\d+\.\d+% on |BLEU \d+\.\d+ on ", section), "the accuracy"
        assert "Licence" in section
        assert "Data" in section


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_stored_in_half_precision_and_load_as_float32(name: str) -> None:
    stored = load_file(BUNDLED_FOLDER / name / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()} == {torch.float16}
    model = vitrail.load(name)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert not model.training
    half = vitrail.load(name, dtype=torch.float16)
    assert {tensor.dtype for tensor in half.parameters()} == {torch.float16}
    parameters = sum(each.numel() for each in model.parameters())
    assert f"{parameters:,} parameters" in get_section(name)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_everything_that_takes_a_model_takes_the_name(name: str) -> None:
    loaded = vitrail.open_model(name)
    assert loaded.source == name
    assert loaded.labels is not None
    assert len(loaded.labels) == loaded.classes == 10
    top = vitrail.Predictor(name).predict("example:cat").top
    assert top[0].label in loaded.labels
    explanation = vitrail.Explainer(name).explain("example:cat")
    assert explanation.prediction is not None
    assert explanation.prediction.top[0].label == top[0].label
    assert vitrail.describe(name).labels == loaded.labels


def test_vit_fashion_is_as_accurate_as_the_readme_says() -> None:
    opened = open_checkpoint_evaluation("vit_fashion", device="cpu", batch=250, strict=True)  # data of its training
    assert opened.data == "fashion"
    result = opened.run()
    assert f"{result.top1 * 100:.1f}% on the {len(opened.images):,} test images" in get_section("vit_fashion")


def test_transformer_tatoeba_translates() -> None:
    pytest.importorskip("tokenizers", reason="needs the extra `text`")
    translator = vitrail.Translator(TRANSLATOR)
    assert translator.languages == ("de", "en")
    texts = [each.text for each in translator.translate(["Tom ist müde.", "Wo ist der Bahnhof?"])]
    assert texts[0] == "Tom is tired."
    assert "train station" in texts[1]


def test_transformer_tatoeba_is_as_good_as_after_its_training() -> None:
    """On the first 200 of the held-out pairs, whose BLEU the training measured."""
    pytest.importorskip("tokenizers", reason="needs the extra `text`")
    pytest.importorskip("sacrebleu", reason="needs the extra `text`")
    opened = open_text_evaluation(TRANSLATOR, beam=1, device="cpu")  # without data: that it was trained on
    assert (opened.data, len(opened.pairs)) == ("tatoeba", 1000)
    some = SentencePairs(opened.pairs.sources[:200], opened.pairs.targets[:200])
    found = replace(opened, pairs=some, encoded=EncodedPairs.encode(some, opened.loaded.tokenizer)).run()
    assert found.scores.bleu == pytest.approx(vitrail.describe(TRANSLATOR).provenance["validation"]["bleu"], abs=1)


def test_cct_cifar10_recognizes_the_cat() -> None:
    top = vitrail.Predictor("cct_cifar10").predict("example:cat").top[0]
    assert top.label == "cat"
    assert top.probability > 0.5


def test_vit_cifar10_has_positions_and_distances_worth_a_look() -> None:
    photos = ["example:cat", "example:rocket", "example:coffee"]
    arrays = {figure.name: figure.arrays for figure in vitrail.look("vit_cifar10", photos).figures}
    near, far = compare_near_and_far(arrays["position_similarity"]["similarity"])
    assert near > 0.6
    assert far < 0.1
    distances = arrays["attention_distance"]["distances"]  # pixels, by layer and head
    uniform = uniform_attention_distance((8, 8), (4, 4))
    assert distances.min() < 0.7 * uniform
    assert distances.max() > 0.75 * uniform


def test_an_existing_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = vitrail.create("vit_tiny_patch16_224", image_size=32, width=12, depth=1, classes=3)
    vitrail.save(own, "vit_fashion", preprocessing=vitrail.Preprocessing(image_size=32))
    assert find_bundled_model("vit_fashion") is None
    with pytest.warns(CheckpointWarning, match="which is used instead of the model of this name"):
        assert vitrail.load("vit_fashion").config.classes == 3
    assert identify_model("vit_fashion")["model"] == str(tmp_path / "vit_fashion")


@pytest.mark.parametrize("open_by_name", [vitrail.load, vitrail.open_model, vitrail.Predictor, vitrail.describe])
@pytest.mark.parametrize("name", ["vit_fashon", "vit-fashion", "ViT_Fashion"])
def test_a_near_miss_suggests_the_name(open_by_name: Callable[[str], Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^{name} .*; did you mean .*'vit_fashion'\?$"):
        open_by_name(name)


def test_a_job_knows_the_weights_by_their_contents() -> None:
    """So that it is not resumed with the weights of another version of the package."""
    assert compute_model_checksums("vit_fashion") == compute_model_checksums(BUNDLED_FOLDER / "vit_fashion")
    assert identify_model("vit_fashion")["model"] == "vit_fashion"
    assert identify_model("vit_fashion")["weights"]
    assert identify_model("vit_fashon") == {"model": "vit_fashon", "weights": None}


def test_the_default_data_is_that_of_the_training() -> None:
    loaded = vitrail.open_model("vit_fashion")
    assert find_default_data(loaded) == "fashion"
    assert loaded.checkpoint is not None
    other = replace(loaded.checkpoint.description, labels=("ants", "bees"))  # of a folder called fashion
    assert find_default_data(replace(loaded, checkpoint=replace(loaded.checkpoint, description=other))) is None
    assert find_default_data(replace(loaded, checkpoint=None)) is None
