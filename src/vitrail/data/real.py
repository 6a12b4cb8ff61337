"""ReaL labels, the "reassessed labels" of ImageNet's validation pictures: all the classes that are right for each.

Beyer et al., "Are we done with ImageNet?" (2020); the file is real.json of google-research/reassessed-imagenet.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitrail.errors import DataError, one_line
from vitrail.files import read_text
from vitrail.parsing import parse_json

PICTURES = 50_000
CLASSES = 1000
NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.[^/]*")  # numbered from 1

Answers = tuple[int, ...] | None  # numbers of ImageNet's classes, none of them where nobody could agree


def read_real(path: Path) -> list[tuple[int, ...]]:
    """The classes of each of ImageNet's validation pictures, in their order."""
    expected = f"expected real.json: a list of {PICTURES} lists of class numbers"
    try:
        read: Any = parse_json(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; {expected}") from None
    if not isinstance(read, list) or len(read) != PICTURES or not all(is_answer(each) for each in read):
        raise DataError(f"{path} holds no ReaL labels; {expected}")
    return [tuple(each) for each in read]


def is_answer(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < CLASSES for number in value)


def answers_for(paths: Iterable[str], real: list[tuple[int, ...]]) -> list[Answers]:
    """For each picture its classes, None for those that are not ImageNet's validation pictures."""
    matches = (NAME.fullmatch(path.rsplit("/", 1)[-1]) for path in paths)
    numbers = (int(match[1]) if match else 0 for match in matches)
    return [real[number - 1] if 0 < number <= len(real) else None for number in numbers]
