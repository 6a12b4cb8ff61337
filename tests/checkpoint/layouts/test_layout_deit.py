"""facebook's DeiT and DeiT-III files: timm's models at toy size with their names."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.layout_round_trip import check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

KINDS = {
    "deit": "deit_tiny_patch16_224",
    "distilled": "deit_tiny_distilled_patch16_224",
    "deit3": "deit3_small_patch16_224",
}


def toy(kind: str) -> Any:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return add_weight_noise(timm.create_model(KINDS[kind], **sizes, num_classes=5))


def rename_layer_scales(model: Any) -> dict[str, Any]:
    return {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_outputs(kind: str, tmp_path: Path) -> None:
    theirs = toy(kind)
    torch.save({"model": rename_layer_scales(theirs)}, tmp_path / "weights.pth")
    checkpoint = check_round_trip(tmp_path / "weights.pth", tmp_path / "back.pth", to="deit", heads=4)
    assert checkpoint.description.family == "deit"
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
    assert torch.load(tmp_path / "back.pth", weights_only=True).keys() == {"model"}


def test_averaged_weights_of_a_training_run_are_read(tmp_path: Path) -> None:
    now, average = toy("deit"), toy("deit")
    run = {
        "model": rename_layer_scales(now),
        "model_ema": rename_layer_scales(average),
        "epoch": 3,
        "args": Namespace(lr=1e-3),
    }
    torch.save(run, tmp_path / "run.pth")
    checkpoint = read(tmp_path / "run.pth", heads=4)
    assert max_output_difference(checkpoint.model, average) <= 1e-6
    assert checkpoint.description.provenance["source"]["layout"] == "deit"


def test_preprocessing_and_policy_of_the_layout(tmp_path: Path) -> None:
    torch.save({"model": rename_layer_scales(toy("distilled"))}, tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth", heads=4, image_size=64, classes=3)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.fit, preprocessing.crop, preprocessing.interpolation, preprocessing.mean[0]) == (
        "short_side",
        0.875,
        "bicubic",
        0.485,
    )
    assert "deit positions" in checkpoint.report.resized["pos_embed"]
    assert sorted(checkpoint.report.initialized) == ["head.bias", "head.weight", "head_dist.bias", "head_dist.weight"]


def test_a_plain_vit_can_be_written(tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("ViT-Ti/16", image_size=32, width=32, heads=2, depth=1, classes=3))
    write(model, tmp_path / "weights.pth", "deit")
    checkpoint = read(tmp_path / "weights.pth", heads=2)
    assert max_output_difference(checkpoint.model, model) <= 1e-6
    with pytest.raises(CheckpointError, match=r"pool is 'mean', which deit cannot represent; expected 'class'"):
        write(vitrail.create("ViT-Ti/16", image_size=32, pool="mean"), tmp_path / "weights.pth", "deit")


def test_round_trip_of_the_public_file(shared: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = check_round_trip(shared("weights/deit_tiny_patch16_224.pth"), tmp_path / "back.pth", to="deit")
    assert vitrail.create("DeiT-Ti").config == checkpoint.model.config
    assert len(read_tensors(tmp_path / "back.pth")) == 152


@pytest.mark.parametrize(("layout", "fields"), [("deit", {}), ("mae", {}), ("dino", {"classes": 0})])
def test_written_safetensors_name_their_layout(layout: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("ViT-Ti/16", image_size=32, width=64, heads=1, depth=1, **fields))
    write(model, tmp_path / "weights.safetensors", layout)
    assert vitrail.describe(tmp_path / "weights.safetensors").provenance["source"]["layout"] == layout
