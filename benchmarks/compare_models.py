"""What `compare_versions.py` measures in Python, in each version: `python compare_models.py OUT FILES`.

OUT/presets has the weights and outputs of every preset at toy size, OUT/files a model of each family in every layout,
and OUT/opened the outputs of the models in FILES, which another version may have written. Only public names are used.
"""

import sys
import warnings
from collections.abc import Callable
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
ENDINGS = {"google": ".npz", **dict.fromkeys(("vitrail", "hf", "timm"), "")}  # folders
SAVED: dict[str, tuple[str, dict[str, Any]]] = {  # models next to the first of each family
    "vit-map": ("vit_tiny_patch16_224", {"pool": "map", "class_token": False, "registers": 2}),
    "vit-sincos": ("vit_tiny_patch16_224", {"width": 48, "heads": 12, "positions": "sincos_2d"}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {}),
    "resnet-cifar": ("resnet20_cifar", {}),
}
SMALLER: dict[str, tuple[Callable[[Any], Any], ...]] = {  # the first that the config accepts; else it stays as it is
    "classes": (lambda classes: min(classes, 10),),
    "cooling": (lambda _: False,),  # which short stages do not use
    "stages": (
        lambda stages: tuple(min(blocks, 1) for blocks in stages),
        lambda stages: (min(stages[0], 2),) * len(stages),
    ),
    "convolutions": (lambda counts: tuple(min(each, 1) for each in counts) if isinstance(counts, tuple) else counts,),
    "widths": tuple(lambda widths, by=by: tuple(width // by for width in widths) for by in (8, 4, 2)),
    "token_widths": tuple(lambda widths, by=by: tuple(width // by for width in widths) for by in (8, 4, 2)),
    "reattending": (lambda _: 1,),
    "vocabulary": (lambda _: 50,),
    **{name: (lambda _: 1,) for name in ("class_depth", "encoder_depth", "decoder_depth")},
    "depth": (lambda _: 2, lambda _: 3),
    "mlp_width": (lambda _: 24,),
    "hidden": (lambda _: 24,),
}


def try_fields(config: Any, **values: Any) -> Any:
    try:
        return replace(config, **values)
    except (vitrail.VitrailError, TypeError, ValueError):
        return None


def shrink(config: Any) -> Any:
    """The config with few narrow layers; images keep their size, which windows and positions depend on."""
    if {"width", "heads"} <= {field.name for field in fields(config)}:
        config = try_fields(config, width=8 * config.heads) or config
    for name, changes in SMALLER.items():
        if value := getattr(config, name, None):
            smaller = (try_fields(config, **{name: change(value)}) for change in changes)
            config = next(filter(None, smaller), config)
    return config


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


def run(model: Any) -> dict[str, Any]:
    """Outputs by name; of a model without tokens or maps, the reason's type."""
    if getattr(model, "reads", "images") != "images":
        return {}
    images = torch.rand(1, model.config.channels, *model.config.image_size, generator=torch.Generator().manual_seed(2))
    outputs = dict[str, Any]()
    for name in ("forward", "tokens", "feature_maps"):
        try:
            result = getattr(model, name)(images)
        except (vitrail.VitrailError, AttributeError, ValueError) as error:
            result = type(error).__name__
        parts = result if isinstance(result, tuple | list) else [result]
        outputs |= {f"{name} {number}": np.array(part) for number, part in enumerate(parts)}
    return outputs


def write_layouts(model: Any, path: str) -> dict[str, Any]:
    """Write the files of the layouts that support the model; return which do not."""
    refused = dict[str, Any]()
    for layout in LAYOUTS:
        try:
            _ = vitrail.save(model, f"{path}-{layout}{ENDINGS.get(layout, '.pth')}", to=layout)
        except vitrail.VitrailError as error:
            refused[layout] = np.array(type(error).__name__)
    return refused


def run_file(path: Path, heads: int) -> dict[str, Any]:
    """The outputs of the model in a file that may not contain the number of heads; else the type of the error."""
    refused, more = "", dict[str, Any](heads=heads)
    for given in (dict[str, Any](), more):
        try:
            return run(vitrail.load(path, **given).eval())
        except vitrail.VitrailError as error:
            refused = type(error).__name__
    return {"refused": np.array(refused)}


def main(out: Path, files: Path) -> None:
    for folder in ("presets", "files", "opened"):
        (out / folder).mkdir(parents=True)
    saved = dict(SAVED)
    for name in vitrail.list_models():
        model = build(name)
        saved.setdefault(type(model.config).__name__, (name, {}))
        weights = {f"weights {key}": np.array(tensor) for key, tensor in model.state_dict().items()}
        add_noise(model)
        np.savez(out / "presets" / f"{name}.npz", **weights, **run(model))
    for name, (preset, values) in saved.items():
        model = build(preset, **values)
        add_noise(model)
        np.savez(out / "opened" / f"{name}-refused.npz", **write_layouts(model, f"{out}/files/{name}"))
        for path in files.glob(f"{name}-*"):
            np.savez(out / "opened" / f"{path.name}.npz", **run_file(path, getattr(model.config, "heads", 2)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _ = torch.set_grad_enabled(False)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
