"""Toy models and their exports, each written once for all tests and all workers: writing one takes seconds."""

import fcntl
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.noisy_weights import add_weight_noise, randomize_batch_norms

import vitrail
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.export import EXPORT_STAGES, export_model

SIZE = (48, 32)  # 3×2 patches: rows and columns are not to be mixed up
PREPROCESSING = Preprocessing(image_size=SIZE, crop=0.8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
CHECKSUM_KEYS = ("files", "checksum")
LABELS = ("ants", "bees", "cats", "dogs", "eels")
VIT: dict[str, Any] = {"preset": "vit_tiny_patch16_224", "depth": 2, "width": 16, "heads": 2}
TOY_FIELDS: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "vit any size": {**VIT, "depth": 1, "dynamic": True},
    "map": {
        **VIT,
        "depth": 1,
        "pool": "map",
        "registers": 2,
        "activation": "swiglu",
        "layer_scale": 0.5,
        "prefix_positions": False,
    },
    "mean": {**VIT, "pool": "mean", "class_token": False, "activation": "gelu_tanh", "head": "mlp", "qkv_bias": False},
    "mean_norm": {**VIT, "pool": "mean_norm", "positions": "relative"},
    "rotary": {**VIT, "depth": 1, "positions": "rotary", "registers": 1},
    "none": {**VIT, "positions": "none"},
    "learned_2d": {**VIT, "positions": "learned_2d", "positions_at": "layers"},
    "sincos": {**VIT, "positions": "sincos"},
    "sincos_2d": {**VIT, "positions": "sincos_2d", "positions_at": "shared"},
    "deit": {**VIT, "preset": "deit_tiny_patch16_224", "layer_scale": 0.5},
    "distilled": {**VIT, "depth": 1, "preset": "deit_tiny_distilled_patch16_224"},
    "hybrid": {**VIT, "preset": "vit_tiny_r_s16_p8_224", "patch_size": 4},
    "cct": {"preset": "cct_7_3x1_32", "depth": 1, "width": 16, "heads": 2, "stem": (8,)},
    "cct neighbors": {"preset": "cct_7_3x1_32", "depth": 1, "width": 16, "heads": 2, "neighbors": True},
    "cait": {**VIT, "depth": 1, "preset": "cait_xxs24_224", "class_depth": 1, "layer_scale": 0.5},
    "t2t": {**VIT, "depth": 1, "preset": "t2t_vit_7", "stage_width": 8},
    "t2t transformer": {**VIT, "depth": 1, "preset": "t2t_vit_t_14", "stage_width": 8},
    "linformer": {**VIT, "preset": "linformer_tiny_patch16_224", "projected": 4},
    "linformer, each head": {**VIT, "preset": "linformer_tiny_patch16_224", "projected": 4, "shared": "none"},
    "axial": {**VIT, "preset": "axial_tiny_patch16_224"},
    "sl_vit": {**VIT, "preset": "sl_vit_patch4_32", "patch_size": 16},
    "parallel_vit": {**VIT, "depth": 1, "preset": "vit_small_patch16_18x2_224", "layer_scale": 0.5},
    "deepvit": {**VIT, "preset": "deepvit_S", "reattending": 1},
    "crossvit": {
        "preset": "crossvit_tiny_240",
        "patch_sizes": (8, 16),
        "scales": (1.0, 0.8),
        "widths": (8, 16),
        "heads": (2, 2),
        "branch_depths": (1, 2),
        "depth": 1,
    },
    "resnet": {"preset": "resnet18", "stages": (1, 1), "width": 8},
    "regnety": {"preset": "regnety_160", "stages": (1, 1), "widths": (16, 32), "group_width": 8},
}


@dataclass(frozen=True)
class ExportSpec:
    model: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])


EXPORT_SPECS = {
    "onnx": ExportSpec("vit"),
    "int8": ExportSpec("vit", {"to": "onnx-int8"}),
    "any size": ExportSpec("vit any size", {"dynamic": True}),
    "portable": ExportSpec("map", {"portable": True}),
    "tokens": ExportSpec("rotary", {"output": "tokens"}),
    "program": ExportSpec("distilled", {"to": "torch-export"}),
}
ExportFinder = Callable[[str], Path]


def make_toy_model(name: str, **fields: Any) -> Any:
    """Always the same weights, and of a size at which wrong answers show."""
    given: dict[str, Any] = {"image_size": SIZE, "classes": len(LABELS), **TOY_FIELDS[name], **fields}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        return randomize_batch_norms(add_weight_noise(vitrail.create(given.pop("preset"), **given), std=0.2))


def save_toy_model(folder: Path, name: str = "vit", **fields: Any) -> Path:
    vitrail.save(make_toy_model(name, **fields), folder, labels=LABELS, preprocessing=PREPROCESSING)
    return folder


def make_export_finder(factory: pytest.TempPathFactory, worker: str) -> ExportFinder:
    """Folders by their names in EXPORTS; they are everybody's, so nobody may change them."""
    root = factory.getbasetemp() if worker == "master" else factory.getbasetemp().parent  # of all workers

    def find(name: str) -> Path:
        what, folder = EXPORT_SPECS[name], root / "exports" / name.replace(" ", "_")
        folder.parent.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                stages = list[int]()
                export_model(
                    make_toy_model(what.model),
                    folder,
                    preprocessing=PREPROCESSING,
                    labels=LABELS,
                    progress=stages.append,
                    **what.options,
                )
                assert sum(stages) == EXPORT_STAGES[what.options.get("to", "onnx")], "the bar reaches its end"
        return folder

    return find


def remove_checksums(folder: Path) -> Path:
    """As earlier versions wrote it: what is damaged is found by those who read it."""
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: about[name] for name in about if name not in CHECKSUM_KEYS}))
    return folder


def random_pixels(count: int = 3, size: tuple[int, int] = SIZE, seed: int = 0) -> NDArray[np.uint8]:
    """Pictures as an engine takes them: (B, rows, columns, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def reference_probabilities(
    model: Any, pixels: NDArray[np.uint8], how: Preprocessing = PREPROCESSING
) -> NDArray[np.float64]:
    """The probabilities that the model gives, normalized one by one in double precision: (B, classes)."""
    images = ((pixels / 255.0 - np.array(how.mean)) / np.array(how.std)).transpose(0, 3, 1, 2)
    with torch.inference_mode():
        return model(torch.from_numpy(images).float()).double().softmax(-1).numpy()


def softmax_rows(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    return torch.from_numpy(logits).double().softmax(-1).numpy()
