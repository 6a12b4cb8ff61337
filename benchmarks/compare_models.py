"""What `compare_versions.py` measures in Python, in each version: `python compare_models.py OUT FILES`.

OUT/presets has the weights and outputs of every preset at toy size, OUT/files a model of each family in every layout,
and OUT/opened what the models in FILES, which another version may have written, compute. Only public names are used.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail

LAYOUTS = (
    *("vitrail", "timm", "hf", "torchvision", "google", "deit", "dino", "mae", "moco", "akamaster", "t2t"),
    *("t2t_by_width", "imagegpt", "authors"),
)
FOLDERS, ENDINGS = ("vitrail", "hf", "timm"), {"google": ".npz"}
SAVED = {  # models next to the first of each family
    "vit-map": ("vit_tiny_patch16_224", {"pool": "map", "class_token": False, "registers": 2}),
    "vit-sincos": ("vit_tiny_patch16_224", {"width": 48, "heads": 12, "positions": "sincos_2d"}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {}),
    "resnet-cifar": ("resnet20_cifar", {}),
}
SMALLER: dict[str, tuple[Callable[[Any], Any], ...]] = {  # the first that the config accepts; else it stays as it is
    "classes": (lambda classes: min(classes, 10),),
    "stages": (
        lambda stages: tuple(min(blocks, 1) for blocks in stages),
        lambda stages: (min(stages[0], 2),) * len(stages),
    ),
    "convolutions": (lambda counts: tuple(min(count, 1) for count in counts),),
    "widths": tuple(lambda widths, by=by: tuple(width // by for width in widths) for by in (8, 4, 2)),
    "token_widths": tuple(lambda widths, by=by: tuple(width // by for width in widths) for by in (8, 4, 2)),
    "reattending": (lambda _: 1,),
    "vocabulary": (lambda _: 50,),
    **{name: (lambda _: 1,) for name in ("class_depth", "encoder_depth", "decoder_depth")},
    "depth": (lambda _: 2, lambda _: 3),
    "mlp_width": (lambda _: 24,),
    "hidden": (lambda _: 24,),
}


def shrink(config: Any) -> Any:
    """The config with few narrow layers; images keep their size, which windows and positions depend on."""
    names = {field.name for field in fields(config)}
    if {"width", "heads"} <= names:
        config = try_field(config, "width", lambda _: 8 * config.heads) or config
    for name, changes in SMALLER.items():
        value = getattr(config, name, None)
        if value:
            config = next(filter(None, (try_field(config, name, change) for change in changes)), config)
    return config


def try_field(config: Any, name: str, change: Callable[[Any], Any]) -> Any:
    try:
        return replace(config, **{name: change(getattr(config, name))})
    except (vitrail.VitrailError, TypeError, ValueError):
        return None


def build(name: str, **values: Any) -> Any:
    """The preset at toy size."""
    with torch.device("meta"):
        full = vitrail.create(name).config
    config = replace(shrink(full), **values)
    _ = torch.manual_seed(0)
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return vitrail.create(name, **{key: value for key, value in given.items() if value != getattr(full, key)}).eval()


def add_noise(model: Any) -> None:
    """A new head is zero, and untrained models give every class the same logit."""
    random = torch.Generator().manual_seed(1)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            _ = tensor.add_(torch.rand(tensor.shape, generator=random), alpha=0.1)


def run(model: Any) -> Iterator[tuple[str, Any]]:
    """Outputs by name; of a model without tokens or maps, the reason's type."""
    if getattr(model, "reads", "images") != "images":
        return
    images = torch.rand(1, model.config.channels, *model.config.image_size, generator=torch.Generator().manual_seed(2))
    for name in ("forward", "tokens", "feature_maps"):
        try:
            result = getattr(model, name)(images)
        except (vitrail.VitrailError, AttributeError, ValueError) as error:
            result = type(error).__name__
        for number, part in enumerate(result if isinstance(result, tuple | list) else [result]):
            yield f"{name} {number}", np.array(part)


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def write_layouts(name: str, model: Any, folder: Path) -> None:
    """The files of the layouts that take the model, and which do not."""
    taken = dict[str, Any]()
    for layout in LAYOUTS:
        path = folder / f"{name}-{layout}{'' if layout in FOLDERS else ENDINGS.get(layout, '.pth')}"
        try:
            _ = vitrail.save(model, path, to=layout)
        except vitrail.VitrailError as error:
            taken[layout] = np.array(type(error).__name__)
    save_arrays(folder / f"{name}-refused.npz", taken)


def open_file(path: Path, heads: Any) -> Any:
    """The model in a file that may not say how many heads it has; else the type of the error."""
    refused = ""
    for said in ({}, {"heads": heads}):
        try:
            return vitrail.load(path, **said).eval()
        except vitrail.VitrailError as error:
            refused = type(error).__name__
    return refused


def main(out: Path, files: Path) -> None:
    saved: dict[str, tuple[str, dict[str, Any]]] = dict(SAVED)
    for name in vitrail.list_models():
        model = build(name)
        saved.setdefault(type(model.config).__name__, (name, {}))
        weights = {f"weights {key}": np.array(tensor) for key, tensor in model.state_dict().items()}
        add_noise(model)
        save_arrays(out / "presets" / f"{name}.npz", weights | dict(run(model)))
    for name, (preset, values) in saved.items():
        model = build(preset, **values)
        add_noise(model)
        write_layouts(name, model, out / "files")
        for path in sorted(files.glob(f"{name}-*")):
            if path.stem != f"{name}-refused":
                opened = open_file(path, getattr(model.config, "heads", 2))
                arrays = {"refused": np.array(opened)} if isinstance(opened, str) else dict(run(opened))
                save_arrays(out / "opened" / f"{path.name}.npz", arrays)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _ = torch.set_grad_enabled(False)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
