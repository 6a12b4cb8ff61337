"""Public weights by name: from a cache or downloaded once, with preprocessing and class names, without a warning."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save, save_file
from support.fake_hub import FakeHub, respond_with, sha256_digest

import vitrail
from vitrail.base.errors import CheckpointError, CheckpointWarning
from vitrail.base.files import get_cache_folder
from vitrail.checkpoint import read
from vitrail.checkpoint.model_location import RESTRICTED_LICENSES, locate_or_download_checkpoint
from vitrail.data.images.class_names import expand_imagenet_labels, list_imagenet_labels, read_imagenet_classes
from vitrail.inspection.file_inspection import inspect_file
from vitrail.models.catalog.pretrained import read_pretrained_table

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
REPOSITORY = f"timm/{TINY}"
BUCKET_FILE = (
    "augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224.npz"
)


@cache
def make_tensors(classes: int = 1000, depth: int = 1) -> dict[str, torch.Tensor]:
    """Tensors with timm's names, in one block instead of twelve."""
    model = vitrail.create("vit_tiny_patch16_224", depth=depth, classes=classes)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return model.state_dict()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights that a user has put into the cache are below it."""
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def tiny_hub(hub: FakeHub) -> FakeHub:
    hub.add(
        REPOSITORY,
        {"config.json": b'{"architecture": "vit_tiny_patch16_224"}', "model.safetensors": save(make_tensors())},
    )
    return hub


def get_error(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate_or_download_checkpoint(name)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    return message


def test_weights_are_downloaded_once_by_every_name_of_theirs(tiny_hub: FakeHub) -> None:
    for name in ("vit_tiny_patch16_224", "ViT-Ti/16", TINY, f"ViT-Ti/16.{TINY.partition('.')[2]}"):
        assert len(vitrail.load(name).blocks) == 1
    assert torch.equal(vitrail.load(f"gs://vit_models/{BUCKET_FILE}").head.weight, make_tensors()["head.weight"])
    assert len(tiny_hub.requests_starting_with("GET /large")) == 1
    assert len(tiny_hub.requests_starting_with("GET /api/models")) == 1, "the cache is used without asking the hub"


def test_a_restricted_licence_is_said_once_when_weights_are_downloaded(hub: FakeHub) -> None:
    hub.add("timm/vit_base_patch16_224.mae", {"model.safetensors": save(make_tensors())})
    reason = (
        "vit_base_patch16_224.mae is under the license cc-by-nc-4.0, which forbids commercial use; read it at https:"
    )
    with pytest.warns(CheckpointWarning, match=reason) as said:
        folder = locate_or_download_checkpoint("vit_base_patch16_224.mae")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert locate_or_download_checkpoint("vit_base_patch16_224.mae") == folder


def test_every_licence_of_the_table_is_open_or_is_said() -> None:
    licences = {each.license for weights in read_pretrained_table().values() for each in weights}
    assert licences == {"apache-2.0", "mit", "bsd-3-clause", *RESTRICTED_LICENSES}


def test_a_named_model_has_class_names_and_preprocessing(tiny_hub: FakeHub) -> None:
    loaded = vitrail.open_model("ViT-Ti/16")
    assert loaded.labels is not None
    assert [loaded.labels[index] for index in (0, 203, 281, 285)] == [
        *("tench", "West Highland white terrier", "tabby", "Egyptian cat"),
    ]
    assert loaded.preprocessing == vitrail.Preprocessing(image_size=(224, 224), crop=0.9, interpolation="bicubic")
    prediction = vitrail.Predictor("ViT-Ti/16").predict("example:cat")
    assert prediction.top[0].label == loaded.labels[prediction.top[0].index]
    inspection = inspect_file("ViT-Ti/16")
    assert (inspection.layout, inspection.assumed, inspection.labels) == ("timm", {}, loaded.labels)
    assert vitrail.describe(f"hf-hub:{REPOSITORY}").labels == loaded.labels


def test_create_pretrained_takes_fields(tiny_hub: FakeHub) -> None:
    model = vitrail.create("ViT-Ti/16", pretrained=True, classes=3, image_size=96)
    assert (model.config.classes, model.config.image_size, len(model.blocks)) == (3, (96, 96), 1)
    assert torch.equal(model.blocks[0].mlp.fc1.weight, make_tensors()["blocks.0.mlp.fc1.weight"])
    assert read("ViT-Ti/16", classes=3).description.labels is None
    untrained = vitrail.create("ViT-Ti/16", depth=1)
    assert not torch.equal(untrained.blocks[0].mlp.fc1.weight, make_tensors()["blocks.0.mlp.fc1.weight"])


@pytest.mark.parametrize(
    ("folder", "name", "found"),
    [
        ("vit_tiny_patch16_224", "ViT-Ti/16", True),
        ("vit_tiny_patch16_224", TINY, True),
        (TINY, "vit_tiny_patch16_224", True),
        ("vit_tiny_patch16_224", "ViT-Ti/16.augreg_in21k", False),
        ("vit_tiny_patch16_224.augreg_in21k", "ViT-Ti/16.augreg_in21k", True),
        ("vit_tiny_patch16_224.augreg_in21k", "ViT-Ti/16", False),
    ],
)
def test_weights_that_a_user_has_put_into_the_cache_are_used(
    folder: str, name: str, found: bool, home: Path, hub: FakeHub, offline: Callable[[], None]
) -> None:
    (home / folder).mkdir(parents=True)
    save_file(make_tensors(21843 if name.endswith("in21k") else 1000, depth=12), home / folder / "model.safetensors")
    offline()
    if not found:
        assert "is not downloaded" in get_error(name)
        return
    checkpoint = read(name)
    assert checkpoint.report.assumed == {}
    assert checkpoint.description.preprocessing is not None
    assert (checkpoint.description.labels is None) == name.endswith("in21k")
    assert not hub.requests


def write_hub_cache(cache: Path, repository: str, content: bytes, name: str = "model.safetensors") -> Path:
    """A model in the cache of huggingface_hub as its download leaves it; return the file that its link points to."""
    root, commit = cache / f"models--{repository.replace('/', '--')}", "1" * 40
    blob = root / "blobs" / sha256_digest(content)
    for folder in (root / "refs", root / "blobs", root / "snapshots" / commit):
        folder.mkdir(parents=True)
    blob.write_bytes(content)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots" / commit / name).symlink_to(Path("..", "..", "blobs", blob.name))
    return blob


def load_with_warnings(name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        vitrail.open_model(name)
    return [str(each.message) for each in said]


UNVERIFIED = "its weights were not verified, since the SHA-256 of model.safetensors on the hub is not known"


def test_weights_in_the_hubs_cache_are_verified_without_a_network(
    hub: FakeHub, offline: Callable[[], None], home: Path
) -> None:
    offline()
    blob = write_hub_cache(Path(constants.HF_HUB_CACHE), REPOSITORY, save(make_tensors()))
    link = blob.parents[1] / "snapshots" / ("1" * 40) / "model.safetensors"
    for name in ("ViT-Ti/16", f"hf-hub:{REPOSITORY}"):
        assert load_with_warnings(name) == []
    other = save({name: tensor + 1 for name, tensor in make_tensors().items()})
    blob.write_bytes(other)
    for name in ("ViT-Ti/16", f"hf-hub:{REPOSITORY}"):
        with pytest.raises(CheckpointError, match=f"is not the file of {REPOSITORY} on the hub: its SHA-256 differs"):
            vitrail.load(name)
    link.unlink()
    link.symlink_to(write_hub_cache(Path(constants.HF_HUB_CACHE), "timm/other", save(make_tensors(depth=12))))
    assert load_with_warnings("ViT-Ti/16") == [f"ViT-Ti/16: {UNVERIFIED}"], "the file of another repository"
    link.unlink()
    link.write_bytes(save(make_tensors(depth=12)))
    assert load_with_warnings(f"hf-hub:{REPOSITORY}") == [f"hf-hub:{REPOSITORY}: {UNVERIFIED}"]


def test_real_weights_are_verified_in_the_hubs_cache(
    shared: Callable[[str], Path], hub: FakeHub, offline: Callable[[], None]
) -> None:
    content = shared(f"weights/{TINY}.safetensors").read_bytes()
    offline()
    blob = write_hub_cache(Path(constants.HF_HUB_CACHE), REPOSITORY, content)
    assert load_with_warnings("ViT-Ti/16") == []
    blob.write_bytes(shared("weights/deit_tiny_patch16_224.pth").read_bytes())
    with pytest.raises(CheckpointError, match="its SHA-256 differs"):
        vitrail.load("ViT-Ti/16")


def test_weights_that_somebody_put_there_are_reported_or_refused(
    tiny_hub: FakeHub, offline: Callable[[], None], home: Path
) -> None:
    folder = home / "vit_tiny_patch16_224"
    folder.mkdir(parents=True)
    save_file(make_tensors(depth=12), folder / "model.safetensors")
    assert load_with_warnings("ViT-Ti/16") == [f"ViT-Ti/16: {UNVERIFIED}"]
    save_file(vitrail.create("vit_tiny_patch16_224", depth=2, width=64, heads=2).state_dict(), folder / "a.pth")
    (folder / "a.pth").replace(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ViT-Ti/16: the weights in .* have width 64; expected 192: replace"):
        vitrail.load("ViT-Ti/16")
    save_file(vitrail.create("resnet20_cifar").state_dict(), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="have family resnet; expected vit"):
        vitrail.load("ViT-Ti/16")
    assert load_with_warnings(f"hf-hub:{REPOSITORY}") == [], "downloaded and verified"
    save_file(make_tensors(depth=12), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="its SHA-256 differs"):  # from the one that the hub has stated
        vitrail.load("ViT-Ti/16")
    save_file(make_tensors(), folder / "model.safetensors")
    assert load_with_warnings("ViT-Ti/16") == [], "it is the same file"


def test_an_existing_path_wins_over_a_name(hub: FakeHub, tmp_path: Path) -> None:
    vitrail.save(vitrail.create("ViT-Ti/16", depth=1, image_size=32, classes=7), tmp_path / "ViT-Ti" / "16")
    with pytest.warns(CheckpointWarning, match=r"ViT-Ti/16: it is a file or folder here.*write \./ViT-Ti/16"):
        assert vitrail.load("ViT-Ti/16").config.classes == 7
    assert vitrail.load("ViT-Ti/16/").config.classes == 7
    assert not hub.requests


def test_without_a_network_one_line_says_which_file_to_put_where(
    home: Path, hub: FakeHub, offline: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    for reason in ("there is no network (127.0.0.1: Connection refused)", "HF_HUB_OFFLINE is set"):
        message = get_error("ViT-Ti/16")
        for text in (
            reason,
            f"model.safetensors from https://huggingface.co/{REPOSITORY}",
            f"{home}/vit_tiny_patch16_224/",
        ):
            assert text in message
        offline()
    monkeypatch.delenv("VITRAIL_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert "into ~/.cache/vitrail/vit_tiny_patch16_224.augreg_in21k/" in get_error("ViT-Ti/16.augreg_in21k")


@pytest.mark.parametrize(
    ("start", "fault", "reason"),
    [
        ("GET /large", respond_with(200, body=b"w" * len(save(make_tensors()))), "its SHA-256 differs"),
        ("GET /api", respond_with(404, "RepoNotFound"), "no such repository"),
        ("GET /api", respond_with(503), "the hub returned status 503"),
    ],
)
def test_a_failed_download_is_one_line(start: str, fault: Any, reason: str, home: Path, tiny_hub: FakeHub) -> None:
    tiny_hub.faults[start] = fault
    message = get_error("ViT-Ti/16")
    assert reason in message
    assert f"{home}/vit_tiny_patch16_224/" in message


def test_a_local_file_with_1000_classes_has_the_names_of_imagenet(tmp_path: Path) -> None:
    for name in (TINY, "vit_tiny_patch16_224.my_own"):
        save_file(make_tensors(), tmp_path / f"{name}.safetensors")
        assert vitrail.describe(tmp_path / f"{name}.safetensors").labels == list_imagenet_labels()
    save_file(make_tensors(10), tmp_path / f"{TINY}.safetensors")
    assert vitrail.describe(tmp_path / f"{TINY}.safetensors").labels is None, "it has other classes"
    vitrail.save(vitrail.create("ViT-Ti/16", depth=1), tmp_path / TINY)
    assert vitrail.describe(tmp_path / TINY).labels is None, "vitrail's own folders have their class names with them"


def test_wrong_names_suggest_the_nearest(hub: FakeHub) -> None:
    assert "'vit_tiny_patch16_224'" in get_error("vit_tinny")
    assert "is vit_tiny_patch16_224" in get_error("ViT-Ti/8")
    assert "does not exist" in get_error("runs/demo")
    assert not hub.requests


def test_an_image_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "photo.weights").write_bytes(b"\xff\xd8\xff\xe0 and so on")
    for name in (str(tmp_path / "photo.weights"), "example:cat"):
        with pytest.raises(CheckpointError, match=r"is an image\. The model comes first"):
            vitrail.describe(name)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    assert get_cache_folder() == home
    monkeypatch.delenv("VITRAIL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get_cache_folder() == tmp_path / "vitrail"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert get_cache_folder() == Path(os.environ["HOME"]) / ".cache" / "vitrail"


def test_imagenet_classes() -> None:
    labels = list_imagenet_labels()
    assert len({label.casefold() for label in labels}) == len(labels) == 1000
    assert (labels[0], labels[281], labels[999]) == ("tench", "tabby", "toilet tissue")
    assert [text[:9] for text in read_imagenet_classes()] == sorted(text[:9] for text in read_imagenet_classes())
    assert expand_imagenet_labels(labels)[281] == "n02123045 tabby, tabby cat"
    assert expand_imagenet_labels(["ants", "bees"]) == ["ants", "bees"]


def test_a_saved_folder_that_somebody_put_there_is_reported_or_refused(
    tiny_hub: FakeHub, offline: Callable[[], None], home: Path
) -> None:
    folder = home / "vit_tiny_patch16_224"
    vitrail.save(vitrail.create("vit_tiny_patch16_224"), folder)
    (warned,) = load_with_warnings("ViT-Ti/16")
    assert UNVERIFIED in warned
    vitrail.save(vitrail.load("vit_fashion"), folder)
    with pytest.raises(CheckpointError, match=r"the weights in .* have .*; expected .*: replace them"):
        vitrail.load("ViT-Ti/16")
