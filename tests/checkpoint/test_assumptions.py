"""Fields that a file does not specify are reported once, with the values assumed and how to change them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write

SMALL: dict[str, Any] = {"image_size": 32, "depth": 1, "classes": 3}
KNOWN: dict[str, Any] = {"heads": 12, "activation": "gelu", "norm_eps": 1e-6, "pool": "class", "trained_size": 32}


def save_state_dict(path: Path, **fields: Any) -> Any:
    """Save a state dict with the names of timm, of a model with the width of ViT-S and 12 heads."""
    model = add_weight_noise(vitrail.create("ViT-S/16", **{**SMALL, "heads": 12, **fields}))
    torch.save({"state_dict": model.state_dict()}, path)
    return model


def load_warnings(path: Path, **fields: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vitrail.load(path, **fields)
    return [str(each.message) for each in caught]


def test_one_warning_lists_all_assumed_fields(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "weights.pth")
    assert load_warnings(tmp_path / "weights.pth") == [
        f"{tmp_path / 'weights.pth'} does not specify heads, activation, norm_eps, pool, trained_size, preprocessing; "
        "assumed heads=6, activation=gelu, norm_eps=1e-06, pool=class, trained_size=32x32, "
        "preprocessing=mean 0.5, crop 0.9, bicubic. Change this with `heads=…` and `preprocessing`"
    ]


def test_fields_given_by_the_user_are_not_assumed(tmp_path: Path) -> None:
    model = save_state_dict(tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth", **KNOWN)
    assert checkpoint.report.assumed.keys() == {"preprocessing"}
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(checkpoint.model(images), model(images))
    preprocessing = vitrail.Preprocessing(image_size=32)
    vitrail.Predictor(tmp_path / "weights.pth", preprocessing=preprocessing, fields=KNOWN)  # without a warning


def test_other_warnings_are_in_the_same_line(tmp_path: Path) -> None:
    tensors = save_state_dict(tmp_path / "weights.pth").state_dict()
    torch.save({"model_ema": tensors, "state_dict": tensors}, tmp_path / "weights.pth")
    (line,) = load_warnings(tmp_path / "weights.pth")
    assert "does not specify heads" in line
    assert "the file also has state_dict" in line


@pytest.mark.parametrize(
    ("others", "assumed"), [({}, set[str]()), ({"optimizer": {}, "args": {}}, {"heads"})], ids=["published", "trained"]
)
def test_heads_of_deit_are_known_only_for_published_files(
    others: dict[str, Any], assumed: set[str], tmp_path: Path
) -> None:
    tensors = save_state_dict(tmp_path / "weights.pth", heads=6).state_dict()
    torch.save({"model": tensors, **others}, tmp_path / "weights.pth")
    assert read(tmp_path / "weights.pth").report.assumed.keys() == assumed


@pytest.mark.parametrize(("name", "quiet"), [("dino_deitsmall16_pretrain.pth", True), ("backbone.pth", False)])
def test_a_backbone_counts_as_dinos_by_its_file_name(name: str, quiet: bool, tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("ViT-S/16", **{**SMALL, "classes": 0}))
    torch.save(model.state_dict(), tmp_path / name)
    checkpoint = read(tmp_path / name)
    assert (checkpoint.layout, not checkpoint.report.assumed) == ("dino", quiet)


@pytest.mark.parametrize(("width", "quiet"), [(768, True), (384, False)])
def test_heads_of_torchvision_are_known_only_for_its_widths(width: int, quiet: bool, tmp_path: Path) -> None:
    model = vitrail.create("ViT-S/16", **{**SMALL, "width": width, "heads": 12})
    write(model, tmp_path / "weights.pth", "torchvision")
    assert read(tmp_path / "weights.pth").report.assumed == ({} if quiet else {"heads": 6})


def test_missing_positions_are_reported_as_assumed(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "weights.pth", positions="none")  # rotary ones have no tensors either
    assert read(tmp_path / "weights.pth").report.assumed["positions"] == "none"


def test_a_grid_that_fits_two_image_sizes_is_reported(tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("DeiT-Ti", **{**SMALL, "image_size": (32, 128)}))
    path = tmp_path / "weights.pth"
    with pytest.warns(UserWarning, match=r"deit cannot store image_size=\(32, 128\), .* use \(64, 64\)"):
        write(model, path, "deit")
    assert read(path).report.assumed == {}
    (line,) = load_warnings(path, image_size=(32, 128))
    assert "does not specify trained_size; assumed trained_size=64x64. Change this with `trained_size=…`" in line
    checkpoint = read(path, trained_size=(32, 128))
    assert (checkpoint.report.assumed, checkpoint.report.resized) == ({}, {})
    images = torch.randn(1, 3, 32, 128)
    assert torch.equal(checkpoint.model(images), model(images))
    assert read(path, trained_size=(32, 128), image_size=(64, 64)).report.resized["pos_embed"].endswith("2×8 to 4×4")


@pytest.mark.parametrize(
    ("size", "kind", "message"),
    [
        ((32, 64), CheckpointError, r"trained_size is 32x64, which is 8 patches, .* 17 or 16;"),
        ("large", ConfigError, r"trained_size is 'large'; expected a size in pixels such as 224, or \(rows, columns\)"),
        ((0, 32), ConfigError, r"trained_size is \(0, 32\)"),
        (3.5, ConfigError, r"trained_size is 3\.5"),
    ],
)
def test_an_impossible_trained_size_is_refused(size: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    write(vitrail.create("DeiT-Ti", **{**SMALL, "image_size": 64}), tmp_path / "weights.pth", "deit")
    with pytest.raises(kind, match=message):
        read(tmp_path / "weights.pth", trained_size=size)


@pytest.mark.parametrize("layout", ["vitrail", "hf", "timm"])
def test_trained_size_must_not_contradict_the_file(layout: str, tmp_path: Path) -> None:
    model = vitrail.create("ViT-Ti/16", **{**SMALL, "image_size": (32, 128)})
    write(model, tmp_path / "folder", layout, preprocessing=vitrail.Preprocessing(image_size=(32, 128), fit="squash"))
    assert read(tmp_path / "folder", trained_size=(32, 128)).model.config.image_size == (32, 128)
    with pytest.raises(CheckpointError, match=r"64x64.* 32x128|32x128.* 64x64"):
        read(tmp_path / "folder", trained_size=64)


def test_public_files_load_without_a_warning(shared: Callable[[str], Path]) -> None:
    names = ("deit_tiny_patch16_224.pth", "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors")
    for name in (*names, "resnet20-12fca82f.th", "resnet56-4bfd9763.th"):
        assert load_warnings(shared(f"weights/{name}")) == [], name


def test_writing_warns_about_heads_and_size_that_readers_would_use(tmp_path: Path) -> None:
    model = vitrail.create("ViT-S/16", **{**SMALL, "heads": 12, "image_size": (32, 128)})
    with pytest.warns(UserWarning, match=r"deit cannot store") as caught:
        write(model, tmp_path / "weights.pth", "deit")
    assert [str(each.message).split(" in ")[0].split(":")[0] for each in caught] == [
        "deit cannot store heads=12, and its readers use 6",
        "deit cannot store image_size=(32, 128), and its readers use (64, 64)",
    ]
