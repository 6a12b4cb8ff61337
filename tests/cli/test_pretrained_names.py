"""Commands that open public weights by name, and the messages about names, models and images in the wrong place."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from support.fake_hub import FakeHub, run_hub_for_this_process

import vitrail

Run = Callable[..., Any]
REPOSITORY = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with run_hub_for_this_process(tmp_path / "cache", monkeypatch) as hub:
        yield hub


def test_predict_by_name_prints_class_names_and_nothing_else(
    shared: Callable[[str], Path], vitrail_: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors").read_bytes()
    hub.add(REPOSITORY, {"model.safetensors": weights})
    monkeypatch.setenv("TQDM_POSITION", "-1")  # a progress bar also without a terminal
    done = vitrail_("predict", "ViT-Ti/16", "example:cat", "--format", "json")
    assert done.code == 0, done.err
    assert {each["label"] for each in json.loads(done.out)[0]["top"][:2]} <= {"tabby", "tiger cat", "Egyptian cat"}
    assert "warning" not in done.err
    again = vitrail_("predict", "vit_tiny_patch16_224", "example:cat", "--format", "json")
    assert again.out == done.out
    assert len(hub.requests_starting_with("GET /large")) == 1


@pytest.mark.filterwarnings("default")
def test_a_folder_with_the_name_of_a_model_is_used_and_reported(vitrail_: Run, hub: FakeHub, tmp_path: Path) -> None:
    vitrail.save(vitrail.create("ViT-Ti/16", depth=1, image_size=32, classes=3), tmp_path / "vit_fashion")
    hidden = (
        "vit_fashion: it is a file or folder here, which is used instead of the model of this name; write ./vit_fashion"
    )
    for name, times in (("vit_fashion", 1), ("./vit_fashion", 0)):
        done = vitrail_("predict", name, "example:cat")
        assert (done.code, done.err.count(hidden)) == (0, times), done


def test_wrong_names_and_swapped_arguments_are_one_line(vitrail_: Run, hub: FakeHub, tmp_path: Path) -> None:
    vitrail.save(vitrail.create("ViT-Ti/16", depth=1, image_size=32, classes=3), tmp_path / "my_model")
    (tmp_path / "weights.pth").write_bytes(b"")
    for words, texts in (
        (("predict", "vit_tinny", "example:cat"), ("vit_tinny", "'vit_tiny_patch16_224'")),
        (("models", "vit_tinny"), ("'vit_tiny_patch16_224'",)),
        (("summary", "vit_tinny"), ("'vit_tiny_patch16_224'",)),
        (("explain", "ViT-Ti/8", "example:cat"), ("ViT-Ti/8 has no public weights", "vit_tiny_patch16_224")),
        (("predict", "my_model", "ViT-Ti/16"), ("ViT-Ti/16 is a model", "model comes first")),
        (("predict", "my_model", "my_model"), ("my_model is a model", "model comes first")),
        (("predict", "my_model", "weights.pth"), ("weights.pth is a model", "model comes first")),
        (("predict", "example:cat", "example:coffee"), ("example:cat is an image", "model comes first")),
        (("explain", "example:cat", "my_model"), ("example:cat is an image", "model comes first")),
        (("train", "--init", "example:cat"), ("example:cat is an image",)),
        (("convert", "ViT-Ti/16.none", "out", "--to", "vitrail"), ("'none'", "augreg_in21k")),
        (("summary", "DeiT-Ti", "--tensors"), ("DeiT-Ti cannot be downloaded", "no such repository")),
    ):
        done = vitrail_(*words)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), (words, done)
        assert all(text in done.err for text in texts), (words, done.err)


def test_models_shows_which_presets_have_weights(vitrail_: Run) -> None:
    lines = vitrail_("models", "vit_tiny_patch*4", "--pretrained").out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["vit_tiny_patch16_224", "vit_tiny_patch16_384"]
    assert lines[2].split()[4:6] == ["augreg_in21k_ft_in1k", "75.5"]
    found = json.loads(vitrail_("models", "vit_tiny*4", "--json").out)
    assert [each["tag"] for each in found["vit_tiny_patch16_224"]["weights"]] == [
        "augreg_in21k_ft_in1k",
        "augreg_in21k",
    ]
