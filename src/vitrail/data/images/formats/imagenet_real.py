"""ReaL, the "reassessed labels" of ImageNet's validation images: all correct classes of each.

Beyer et al., "Are we done with ImageNet?" (2020); the file is real.json of google-research/reassessed-imagenet.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_text
from vitrail.base.json_yaml import parse_json

IMAGENET_VAL_IMAGES = 50_000
IMAGENET_CLASSES = 1000
VAL_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.[^/]*")  # numbered from 1

RealLabels = tuple[int, ...] | None  # class indices, () if the annotators did not agree; None: not an image of ReaL


def read_real_labels(path: Path) -> list[tuple[int, ...]]:
    """The correct classes of every validation image of ImageNet, in order."""
    expected = f"expected real.json: a list of {IMAGENET_VAL_IMAGES} lists of class indices"
    try:
        labels: Any = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; {expected}") from None
    if not isinstance(labels, list) or len(labels) != IMAGENET_VAL_IMAGES or not all(map(is_label_list, labels)):
        raise DataError(f"{path} holds no ReaL labels; {expected}")
    return [tuple(each) for each in labels]


def is_label_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < IMAGENET_CLASSES for number in value)


def match_real_labels(paths: Iterable[str], real: list[tuple[int, ...]]) -> list[RealLabels]:
    """The correct classes of each image, None if it is not a validation image of ImageNet."""
    matches = (VAL_IMAGE_NAME.fullmatch(path.rsplit("/", 1)[-1]) for path in paths)
    numbers = (int(match[1]) if match else 0 for match in matches)
    return [real[number - 1] if 0 < number <= len(real) else None for number in numbers]
