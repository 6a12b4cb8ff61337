"""What the tests of every architecture do: count parameters, infer presets, export, and learn the bundled images."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from vitrail.checkpoint.config_from_shapes import infer_config
from vitrail.cli import build_app
from vitrail.models.catalog.families import find_preset
from vitrail.train.run_folder import RunFolder


def mark_most_slow(names: Iterable[str]) -> list[Any]:
    """For tests of full-size presets: the first runs always, the others with the slow tests."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


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


LINEAR_TOP1 = 0.847  # of logistic regression on the pixels, with the weight decay that is best for the test images
MIN_AGREEMENT = 0.97  # share of the test images for which int8 has the top class of float32


def check_learning(name: str, fields: str, folder: Path) -> None:
    """The recipe `fashion` trains a preset with other fields above a linear model, and int8 agrees with the result."""
    settings = [word for field in fields.split() for word in ("--set", field)]
    words = ["train", "--recipe", "fashion", "--model", name, *settings, "--out", str(folder / "run")]
    build_app()(words, exit_on_error=False, result_action="return_value")
    top1 = RunFolder(folder / "run").read_records()[-1]["val_top1"]
    agreement = measure_int8_agreement(folder / "run", folder / "int8")
    logging.getLogger(__name__).info("%s: top-1 %.1f %%, int8 agrees for %.1f %%", name, 100 * top1, 100 * agreement)
    assert top1 > LINEAR_TOP1
    assert agreement >= MIN_AGREEMENT


def measure_int8_agreement(run: Path, folder: Path) -> float:
    """The share of images with the same top class: the bundled test images, and the photos and noise of every check."""
    loaded, predictor = vitrail.open_model(str(run)), vitrail.Predictor(str(run))
    tests = vitrail.open_data("fashion").val
    assert tests is not None
    assert isinstance(loaded.model, nn.Module)
    images = np.stack([predictor.prepare_image(tests[number][0]) for number in range(len(tests))])
    how = loaded.preprocessing
    _, check = vitrail.export_model(loaded.model, folder, preprocessing=how, to="onnx-int8", images=images)
    return check.same / check.images
