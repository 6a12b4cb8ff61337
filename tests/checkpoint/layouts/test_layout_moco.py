"""MoCo v3: training checkpoints and linear probes; timm's models with 12 heads, as its code builds them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.layout_round_trip import assert_same_tensors, max_output_difference
from support.noisy_weights import add_weight_noise
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.family_recognition import make_sincos_table


def toy(**fields: Any) -> Any:
    shape: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 384, "depth": 1, "num_heads": 12}
    model: Any = add_weight_noise(VisionTransformer(**shape, **fields))
    with torch.no_grad():
        model.pos_embed.copy_(make_sincos_table(2, 384, columns_first=False))
    return model


def make_training_checkpoint(theirs: Any) -> dict[str, Any]:
    encoder = {**theirs.state_dict(), "head.0.weight": torch.randn(8, 384), "head.1.running_mean": torch.randn(8)}
    tensors = {f"module.{part}_encoder.{n}": each for part in ("base", "momentum") for n, each in encoder.items()}
    return {"epoch": 300, "arch": "vit_small", "state_dict": {**tensors, "module.predictor.0.weight": torch.ones(8, 8)}}


def load_state_dict(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def test_round_trip_of_a_base_encoder_with_12_heads(tmp_path: Path) -> None:
    theirs = toy(num_classes=0)
    torch.save(make_training_checkpoint(theirs), tmp_path / "vit-s-300ep.pth.tar")
    checkpoint = read(tmp_path / "vit-s-300ep.pth.tar")
    assert (checkpoint.layout, checkpoint.model.config.heads, checkpoint.model.config.classes) == ("moco", 12, 0)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    assert (checkpoint.report.warnings, checkpoint.report.assumed) == ((), {})
    ignored = checkpoint.report.ignored
    assert {"base_encoder.head.0.weight", "momentum_encoder.cls_token", "predictor.0.weight"} <= {*ignored}
    assert "base_encoder.cls_token" not in ignored
    vitrail.load(tmp_path / "vit-s-300ep.pth.tar")  # without a warning
    write(checkpoint.model, tmp_path / "back.pth", "moco")
    assert_same_tensors(
        {f"module.base_encoder.{name}": tensor for name, tensor in theirs.state_dict().items()},
        load_state_dict(tmp_path / "back.pth"),
    )


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_a_probe_is_recognized_by_its_position_table(wrapper: str, tmp_path: Path) -> None:
    theirs = toy(num_classes=5)
    named = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({wrapper: named}, tmp_path / "linear-vit-s.pth.tar")
    checkpoint = read(tmp_path / "linear-vit-s.pth.tar")
    assert (checkpoint.layout, checkpoint.report.assumed) == ("moco", {})
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    write(checkpoint.model, tmp_path / "back.pth", "moco")
    assert_same_tensors(named, load_state_dict(tmp_path / "back.pth"))


def test_the_position_table_of_mae_is_not_mocos(tmp_path: Path) -> None:
    tensors = toy(num_classes=0).state_dict()
    tensors["pos_embed"] = make_sincos_table(2, 384, columns_first=True)
    torch.save({"model": tensors}, tmp_path / "mae.pth")
    checkpoint = read(tmp_path / "mae.pth")
    assert (checkpoint.layout, checkpoint.report.assumed) == ("mae", {"heads": 6})  # MAE has no model of this width


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"image_size": 32, "depth": 1}
    with pytest.raises(CheckpointError, match=r"heads is 6, which moco cannot represent; expected 12"):
        write(vitrail.create("ViT-S/16", **fields, classes=0), tmp_path / "weights.pth", "moco")
    with pytest.raises(CheckpointError, match="moco can store 5 classes only with its own position table; expected 0"):
        write(vitrail.create("ViT-S/16", **fields, heads=12, classes=5), tmp_path / "weights.pth", "moco")
    assert not [*tmp_path.iterdir()]
