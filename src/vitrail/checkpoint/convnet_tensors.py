"""Convnets in files: the names of their tensors, which are timm's, and their config from the shapes."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import CheckpointError

TensorShapes = Mapping[str, tuple[int, ...]]
BATCH_COUNTER = "num_batches_tracked"  # of a batch norm; files from before torch 0.4.1 have none


def batch_norm_names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in ("*", "running_mean", "running_var", BATCH_COUNTER))


RESNET_NAMES = (
    "conv1.weight",
    *batch_norm_names("bn1"),
    *(f"layer#.#.conv{n}.weight" for n in (1, 2, 3)),
    *(name for n in (1, 2, 3) for name in batch_norm_names(f"layer#.#.bn{n}")),
    "layer#.#.downsample.0.weight",
    *batch_norm_names("layer#.#.downsample.1"),
    "fc.*",
)
REGNETY_PARTS = ("stem", *(f"s#.b#.{part}" for part in ("conv1", "conv2", "conv3", "downsample")))
REGNETY_NAMES = (
    *(name for part in REGNETY_PARTS for name in (f"{part}.conv.weight", *batch_norm_names(f"{part}.bn"))),
    *("s#.b#.se.fc1.*", "s#.b#.se.fc2.*", "head.fc.*"),
)
CONVNET_NAMES = {"resnet": RESNET_NAMES, "regnety": REGNETY_NAMES}
FAMILY_MARKERS = {
    "resnet": "layer1.0.conv1.weight",
    "regnety": "s1.b1.conv1.conv.weight",
}  # a tensor that tells the family


def find_convnet_family(names: Mapping[str, object]) -> str | None:
    """The family of convnets that the names are of, if it is one."""
    return next((family for family, mark in FAMILY_MARKERS.items() if mark in names), None)


def add_batch_counters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the counters of batch norms, which nothing reads unless their momentum is none; old files lack them."""
    ends = ".running_mean"
    norms = [name.removesuffix(ends) for name in tensors if name.endswith(ends)]
    return {**{f"{name}.{BATCH_COUNTER}": torch.zeros((), dtype=torch.int64) for name in norms}, **tensors}


def infer_convnet_config(sizes: TensorShapes, family: str, image_size: tuple[int, int] | None) -> dict[str, Any]:
    """Fields of the family's config; of the size of its pictures a convnet's tensors say nothing."""
    found = CONVNET_CONFIGS[family](sizes)
    return {**found, "image_size": image_size or found["image_size"]}


def infer_resnet_config(sizes: TensorShapes) -> dict[str, Any]:
    stem = get_convnet_shape(sizes, "conv1.weight", 4)
    if stem[2:] not in ((3, 3), (7, 7)):
        raise CheckpointError(f"conv1.weight is of shape {stem}; expected a kernel of 7×7, or 3×3 as for CIFAR")
    return {
        "image_size": (224, 224) if stem[2] == 7 else (32, 32),
        "stages": count_stage_blocks(sizes, r"layer(\d+)\.", r"layer{}\.(\d+)\."),
        "block": "bottleneck" if "layer1.0.conv3.weight" in sizes else "basic",
        "stem": "imagenet" if stem[2] == 7 else "cifar",
        "shortcut": "projection" if any(".downsample." in name for name in sizes) else "padding",
        "channels": stem[1],
        "classes": get_convnet_shape(sizes, "fc.weight", 2)[0] if "fc.weight" in sizes else 0,
        "width": stem[0],
    }


def infer_regnety_config(sizes: TensorShapes) -> dict[str, Any]:
    blocks = count_stage_blocks(sizes, r"s(\d+)\.", r"s{}\.b(\d+)\.")
    return {
        "image_size": (224, 224),
        "stages": blocks,
        "widths": tuple(
            get_convnet_shape(sizes, f"s{n}.b1.conv1.conv.weight", 4)[0] for n in range(1, len(blocks) + 1)
        ),
        "group_width": get_convnet_shape(sizes, "s1.b1.conv2.conv.weight", 4)[1],
        "channels": get_convnet_shape(sizes, "stem.conv.weight", 4)[1],
        "classes": get_convnet_shape(sizes, "head.fc.weight", 2)[0] if "head.fc.weight" in sizes else 0,
    }


CONVNET_CONFIGS: dict[str, Callable[[TensorShapes], dict[str, Any]]] = {
    "resnet": infer_resnet_config,
    "regnety": infer_regnety_config,
}


def count_stage_blocks(sizes: TensorShapes, stage: str, block: str) -> tuple[int, ...]:
    """How many blocks each stage has, by the numbers in names, stages counted from 1."""
    number = len(find_name_numbers(sizes, stage))
    return tuple(len(find_name_numbers(sizes, block.format(each))) for each in range(1, number + 1))


def find_name_numbers(sizes: TensorShapes, pattern: str) -> set[str]:
    return {match[1] for name in sizes if (match := re.match(pattern, name))}


def get_convnet_shape(sizes: TensorShapes, name: str, dimensions: int) -> tuple[int, ...]:
    if len(sizes.get(name, ())) != dimensions or 0 in sizes[name]:
        given = f"of shape {sizes[name]}" if name in sizes else "not there"
        raise CheckpointError(f"{name} is {given}; expected {dimensions} dimensions, as in a convnet")
    return sizes[name]
