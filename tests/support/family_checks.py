"""What the tests of every architecture do: count parameters, infer presets, export, and learn the bundled images."""

from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.checkpoint.config_from_shapes import infer_config
from vitrail.cli import build_app
from vitrail.models.catalog import find_preset
from vitrail.train.run_folder import RunFolder


def count_parameters(name: str) -> int:
    with torch.device("meta"):
        model = vitrail.create(name)
    return sum(weight.numel() for weight in model.parameters())


def check_preset_is_inferred(name: str) -> None:
    family, preset = find_preset(name)
    with torch.device("meta"):
        tensors = vitrail.create(name).state_dict()
    assert family.configure(**infer_config(tensors, family, {}).config) == preset


def measure_export_difference(model: Any, folder: Path) -> float:
    """The largest difference of a probability between ONNX Runtime and torch."""
    how = vitrail.Preprocessing(image_size=model.config.image_size)
    _, check = vitrail.export_model(model, folder / "exported", preprocessing=how)
    return check.difference


def train_on_bundled_images(name: str, fields: str, folder: Path) -> float:
    """The top-1 accuracy of a preset with other fields after the recipe `fashion`."""
    settings = [word for field in fields.split() for word in ("--set", field)]
    words = ["train", "--recipe", "fashion", "--model", name, *settings, "--out", str(folder / "run")]
    build_app()(words, exit_on_error=False, result_action="return_value")
    return RunFolder(folder / "run").read_records()[-1]["val_top1"]
