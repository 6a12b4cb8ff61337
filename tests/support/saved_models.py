"""Toy models on disk: model folders, convnets and run folders."""

import json
from pathlib import Path
from typing import Any

from support.noisy_weights import add_weight_noise

import vitrail

LABELS = ("ants", "bees", "cats")


def write_model_folder(
    folder: Path, preset: str = "vit_tiny_patch16_224", labels: tuple[str, ...] | None = LABELS, **fields: Any
) -> Path:
    """A model of 2×2 patches, 2 layers and 2 heads by default."""
    given = {"image_size": 32, "depth": 2, "width": 16, "heads": 2, "classes": len(labels or ()), **fields}
    model = add_weight_noise(vitrail.create(preset, **given), std=0.3)
    half = (0.5,) * model.config.channels
    how = vitrail.Preprocessing(image_size=32, mean=half, std=half)
    vitrail.save(model, folder, labels=labels, preprocessing=how)
    return folder


def write_convnet_folder(folder: Path) -> Path:
    model = vitrail.create("resnet18", image_size=32, stages=(1, 1), width=8, classes=3)
    vitrail.save(model, folder, labels=LABELS, preprocessing=vitrail.Preprocessing(image_size=32))
    return folder


def write_run_folder(folder: Path, data: Path, **fields: Any) -> Path:
    """A run folder as written by `vitrail train` with half of the data held out."""
    write_model_folder(folder / "model", **fields)
    plan = {"request": {"data": str(data), "val_share": 0.5}, "recipe": {"name": "probe", "seed": 3}}
    (folder / "run.json").write_text(json.dumps(plan))
    return folder
