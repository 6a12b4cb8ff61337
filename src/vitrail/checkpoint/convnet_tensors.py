"""Convnets in checkpoints: the names of their tensors, which are timm's, and their config from the shapes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint.tensor_shapes import (
    TensorShapes,
    count_classes,
    count_distinct_numbers_in_names,
    get_tensor_shape,
)
from vitrail.errors import CheckpointError

BATCH_COUNTER = "num_batches_tracked"  # of a batch norm; missing in files from before torch 0.4.1


def list_batch_norm_names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in ("*", "running_mean", "running_var", BATCH_COUNTER))


RESNET_NAMES = (
    "conv1.weight",
    *list_batch_norm_names("bn1"),
    *(f"layer#.#.conv{n}.weight" for n in (1, 2, 3)),
    *(name for n in (1, 2, 3) for name in list_batch_norm_names(f"layer#.#.bn{n}")),
    "layer#.#.downsample.0.weight",
    *list_batch_norm_names("layer#.#.downsample.1"),
    "fc.*",
)
REGNETY_PARTS = ("stem", *(f"s#.b#.{part}" for part in ("conv1", "conv2", "conv3", "downsample")))
REGNETY_NAMES = (
    *(name for part in REGNETY_PARTS for name in (f"{part}.conv.weight", *list_batch_norm_names(f"{part}.bn"))),
    *("s#.b#.se.fc1.*", "s#.b#.se.fc2.*", "head.fc.*"),
)
CONVNET_NAMES = {"resnet": RESNET_NAMES, "regnety": REGNETY_NAMES}
FAMILY_MARKERS = {"resnet": "layer1.0.conv1.weight", "regnety": "s1.b1.conv1.conv.weight"}  # a tensor of each family


def find_convnet_family(names: Mapping[str, object]) -> str | None:
    """Family of convnets that has tensors of these names, or None."""
    return next((family for family, marker in FAMILY_MARKERS.items() if marker in names), None)


def add_batch_counters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the batch counters that old files lack; they are used only by batch norms without a momentum."""
    suffix = ".running_mean"
    norms = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return {**{f"{name}.{BATCH_COUNTER}": torch.zeros((), dtype=torch.int64) for name in norms}, **tensors}


def infer_convnet_config(shapes: TensorShapes, family: str, image_size: tuple[int, int] | None) -> dict[str, Any]:
    """Fields of the family's config; the shapes do not tell the image size."""
    fields = CONVNET_CONFIGS[family](shapes)
    return {**fields, "image_size": image_size or fields["image_size"]}


def infer_resnet_config(shapes: TensorShapes) -> dict[str, Any]:
    stem = get_tensor_shape(shapes, "conv1.weight", 4)
    if stem[2:] not in ((3, 3), (7, 7)):
        raise CheckpointError(f"conv1.weight has shape {stem}; expected a 7×7 kernel, or 3×3 as for CIFAR")
    return {
        "image_size": (224, 224) if stem[2] == 7 else (32, 32),
        "stages": count_stage_blocks(shapes, r"layer(\d+)\.", r"layer{}\.(\d+)\."),
        "block": "bottleneck" if "layer1.0.conv3.weight" in shapes else "basic",
        "stem": "imagenet" if stem[2] == 7 else "cifar",
        "shortcut": "projection" if any(".downsample." in name for name in shapes) else "padding",
        "channels": stem[1],
        "classes": count_classes(shapes, "fc.weight"),
        "width": stem[0],
    }


def infer_regnety_config(shapes: TensorShapes) -> dict[str, Any]:
    blocks = count_stage_blocks(shapes, r"s(\d+)\.", r"s{}\.b(\d+)\.")
    return {
        "image_size": (224, 224),
        "stages": blocks,
        "widths": tuple(get_tensor_shape(shapes, f"s{n + 1}.b1.conv1.conv.weight", 4)[0] for n in range(len(blocks))),
        "group_width": get_tensor_shape(shapes, "s1.b1.conv2.conv.weight", 4)[1],
        "channels": get_tensor_shape(shapes, "stem.conv.weight", 4)[1],
        "classes": count_classes(shapes, "head.fc.weight"),
    }


CONVNET_CONFIGS: dict[str, Callable[[TensorShapes], dict[str, Any]]] = {
    "resnet": infer_resnet_config,
    "regnety": infer_regnety_config,
}


def count_stage_blocks(shapes: TensorShapes, stage: str, block: str) -> tuple[int, ...]:
    """Number of blocks in each stage, from the numbers in the names; stages are counted from 1."""
    stages = count_distinct_numbers_in_names(shapes, stage)
    return tuple(count_distinct_numbers_in_names(shapes, block.format(n)) for n in range(1, stages + 1))
