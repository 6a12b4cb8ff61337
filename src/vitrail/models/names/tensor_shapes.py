"""Shapes of a checkpoint's tensors by name, and counts of the numbers in the names."""

import re
from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import CheckpointError
from vitrail.models.base.checkpoint_side import TensorShapes


def get_tensor_shape(shapes: TensorShapes, name: str, dimensions: int) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(f"{name} is missing; expected the tensors of a Vision Transformer or a convnet")
    if len(shapes[name]) != dimensions or 0 in shapes[name]:
        raise CheckpointError(f"{name} has shape {shapes[name]}; expected {dimensions} dimensions")
    return shapes[name]


def count_classes(shapes: TensorShapes, head: str) -> int:
    """Rows of the head's weight; 0 without a head."""
    return get_tensor_shape(shapes, head, 2)[0] if head in shapes else 0


def count_distinct_numbers_in_names(names: Mapping[str, object], pattern: str) -> int:
    """How many different numbers the first group of `pattern` has in the names: blocks, stages."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def count_stage_blocks(shapes: TensorShapes, stage: str, block: str, first: int = 1) -> tuple[int, ...]:
    """Number of blocks in each stage, from the numbers in the names; stages are counted from `first`."""
    stages = count_distinct_numbers_in_names(shapes, stage)
    return tuple(count_distinct_numbers_in_names(shapes, block.format(n)) for n in range(first, first + stages))


def describe_stages(
    shapes: TensorShapes, channels: int, stages: tuple[int, ...], widths: tuple[int, ...], head: str = "head.weight"
) -> dict[str, Any]:
    """Fields of every model of stages; its weights do not tell the image size."""
    classes = count_classes(shapes, head)
    return {"image_size": (224, 224), "channels": channels, "classes": classes, "stages": stages, "widths": widths}


def find_published_heads(presets: Mapping[str, Any], widths: tuple[int, ...]) -> dict[str, Any]:
    """The field `heads` of the published model of these widths, since weights do not tell; nothing for other widths."""
    return next(({"heads": each.heads} for each in presets.values() if each.widths == widths), {})
