"""DINO's and DINOv2's files: timm's models at toy size with their names, in both directions."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.layout_round_trip import check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

TOY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}


def toy(name: str, **fields: Any) -> Any:
    fields = {**TOY, **fields}
    return add_weight_noise(timm.create_model(name, **fields))


def make_dinov2(registers: bool, swiglu: bool) -> tuple[Any, dict[str, Tensor]]:
    """A model of timm, and its tensors with the names of DINOv2."""
    name = "vit_giant_patch14_dinov2" if swiglu else "vit_small_patch14_dinov2"
    theirs = toy(name, reg_tokens=4 if registers else 0, no_embed_class=registers)
    tensors = theirs.state_dict()
    names = {"reg_token": "register_tokens", "mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
    if not swiglu:
        names = {"reg_token": "register_tokens"}
    for ours, their in names.items():
        tensors = {name.replace(ours, their): tensor for name, tensor in tensors.items()}
    if registers:  # timm adds the class token's position to the token, DINOv2 has it in the table
        row = torch.randn(1, 1, 32)
        tensors["cls_token"] = tensors["cls_token"] - row
        tensors["pos_embed"] = torch.cat((row, tensors["pos_embed"]), dim=1)
    return theirs, {**tensors, "mask_token": torch.randn(1, 32)}


def test_round_trip_of_a_dino_backbone(tmp_path: Path) -> None:
    theirs = toy("vit_small_patch16_224", num_classes=0)
    torch.save(theirs.state_dict(), tmp_path / "backbone.pth")
    checkpoint = check_round_trip(tmp_path / "backbone.pth", tmp_path / "back.pth", to="dino", heads=4)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.mean[0], checkpoint.description.resampling) == (0.485, "dino")
    assert checkpoint.report.assumed.keys() == {"activation", "norm_eps", "pool", "trained_size", "preprocessing"}
    assert not read(tmp_path / "backbone.pth", heads=4, source="dino").report.assumed  # the user named the layout
    as_timm = read(tmp_path / "backbone.pth", source="timm", heads=4)
    assert as_timm.description.preprocessing is not None
    assert as_timm.description.preprocessing.mean[0] == 0.5


def test_the_teacher_of_a_training_run_is_read(tmp_path: Path) -> None:
    student, teacher = toy("vit_small_patch16_224", num_classes=0), toy("vit_small_patch16_224", num_classes=0)
    head = {"mlp.0.weight": torch.randn(8, 32), "last_layer.weight_v": torch.randn(8, 8)}

    def named(model: Any, before: str) -> dict[str, Tensor]:
        backbone = {f"{before}backbone.{name}": tensor for name, tensor in model.state_dict().items()}
        return {**backbone, **{f"{before}head.{name}": tensor for name, tensor in head.items()}}

    run = {"student": named(student, "module."), "teacher": named(teacher, ""), "epoch": 3, "args": Namespace(lr=1)}
    torch.save({**run, "optimizer": {"state": {}}, "dino_loss": {"center": torch.zeros(1, 8)}}, tmp_path / "run.pth")
    checkpoint = read(tmp_path / "run.pth", heads=4)
    assert max_output_difference(checkpoint.model, teacher) <= 1e-6
    assert sorted(checkpoint.report.ignored) == ["head.last_layer.weight_v", "head.mlp.0.weight"]
    assert not checkpoint.report.warnings


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
def test_round_trip_of_dinov2(registers: bool, swiglu: bool, tmp_path: Path) -> None:
    theirs, tensors = make_dinov2(registers, swiglu)
    torch.save(tensors, tmp_path / "dinov2.pth")
    checkpoint = check_round_trip(
        tmp_path / "dinov2.pth", tmp_path / "back.pth", to="dino", without=("mask_token",), heads=4
    )
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    assert checkpoint.report.ignored == ("mask_token",)
    assert checkpoint.model.config.registers == (4 if registers else 0)
    assert checkpoint.description.resampling == ("timm" if registers else "dino")


def test_blocks_in_chunks_are_renumbered(tmp_path: Path) -> None:
    theirs, tensors = make_dinov2(registers=False, swiglu=False)
    chunks = {"blocks.0.": "blocks.0.0.", "blocks.1.": "blocks.0.1.", "blocks.2.": "blocks.1.2."}
    for name in list(tensors):
        for flat, chunk in chunks.items():
            if name.startswith(flat):
                tensors[name.replace(flat, chunk)] = tensors.pop(name)
    torch.save(tensors, tmp_path / "chunked.pth")
    assert max_output_difference(read(tmp_path / "chunked.pth", heads=4).model, theirs) <= 1e-5


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"image_size": 32, "width": 32, "heads": 2, "depth": 1}
    with pytest.raises(CheckpointError, match=r"classes is 1000, which dino cannot represent; expected 0"):
        write(vitrail.create("ViT-Ti/16", **fields), tmp_path / "weights.pth", "dino")
    model = add_weight_noise(vitrail.create("ViT-Ti/16", **fields, classes=0, registers=2))
    with pytest.raises(CheckpointError, match=r"positions of registers is True, which dino cannot represent"):
        write(model, tmp_path / "weights.pth", "dino")
    model = add_weight_noise(vitrail.create("ViT-Ti/16", **fields, classes=0, registers=2, prefix_positions=False))
    write(model, tmp_path / "weights.pth", "dino")
    assert max_output_difference(read(tmp_path / "weights.pth", heads=2).model, model) <= 1e-6


def test_an_ignored_head_gives_a_warning(tmp_path: Path) -> None:
    torch.save(toy("vit_small_patch16_224", num_classes=5).state_dict(), tmp_path / "classes.pth")
    checkpoint = read(tmp_path / "classes.pth", source="dino", heads=4)
    assert checkpoint.report.ignored == ("head.weight", "head.bias")
    assert len(checkpoint.report.warnings) == 1
    assert "classification head is ignored" in checkpoint.report.warnings[0]
