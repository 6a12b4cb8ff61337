"""Class names: those of ImageNet-1k, and how the classes of a data set are mapped to those of a model.

Classes match by name, by one of several names, by WordNet id or by number. imagenet_classes.txt has one class per line,
with its WordNet id and its names; the first name is the label. Where the first names of two classes are equal, it has
another name first: tank suit, Cardigan Welsh corgi, crane (bird) and crane (machine).
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.text import abbreviate_list

IMAGENET = "imagenet"  # as labels: the names of its classes
CLASSES_FILE = Path(__file__).with_name("imagenet_classes.txt")
WORDNET_ID = re.compile(r"n\d{8}")  # as the folders of ImageNet are named


@cache
def read_imagenet_classes() -> tuple[str, ...]:
    """One text per class, with its id and all its names: "n02123045 tabby, tabby cat"."""
    return tuple(CLASSES_FILE.read_text("utf-8").splitlines())


@cache
def list_imagenet_labels() -> tuple[str, ...]:
    """One short label per class: "tabby"."""
    return tuple(text.partition(" ")[2].partition(",")[0] for text in read_imagenet_classes())


def expand_imagenet_labels(labels: Sequence[str]) -> Sequence[str]:
    """The labels with their ids and all their names if they are those of ImageNet-1k; other labels are unchanged."""
    return read_imagenet_classes() if tuple(labels) == list_imagenet_labels() else labels


def match_data_classes_to_model(
    model_labels: Sequence[str] | None, model_classes: int, data_classes: Sequence[str]
) -> tuple[tuple[int, ...], str]:
    """Class of the model for each class of the data, and a note for the user if names alone do not determine it.

    Classes match by name, also by one of several names ("tench, Tinca tinca"). They match by number if the data's
    classes are named 0 … 999. They match in order if both have the same number of classes and the model has no labels
    or the data's classes are WordNet ids.
    """
    if model_labels is not None and len(model_labels) != model_classes:
        raise DataError(f"it has {len(model_labels)} labels for {model_classes} classes; expected one per class")
    by_name = index_classes_by_name(model_labels or ())
    indices = [by_name.get(normalize_class_name(name)) for name in data_classes]
    if are_known_and_distinct(indices):
        return tuple(index for index in indices if index is not None), ""
    numbers = [parse_class_number(name, model_classes) for name in data_classes]
    if are_known_and_distinct(numbers):
        first = f": {data_classes[0]} is {model_labels[numbers[0] or 0]}" if model_labels else ""
        return tuple(
            n for n in numbers if n is not None
        ), f"the data's class names are class numbers of the model{first}"
    if len(data_classes) == model_classes and (not model_labels or all(map(WORDNET_ID.fullmatch, data_classes))):
        reason = "the data's classes are WordNet ids" if model_labels else "the model has no class names"
        return tuple(range(model_classes)), f"{reason}: classes are matched in order, {data_classes[0]} is class 0"
    unknown = [name for name, index in zip(data_classes, indices, strict=True) if index is None] or data_classes
    known = f"({abbreviate_list(model_labels, 3)})" if model_labels else "without names"
    raise DataError(
        f"{len(unknown)} of the data's {len(data_classes)} classes ({abbreviate_list(unknown, 3)}) are not among the "
        f"model's {model_classes} classes {known}; train the model on this data, or convert it with its `labels`"
    )


def index_classes_by_name(labels: Sequence[str]) -> dict[str, int]:
    """Index every unambiguous name: a complete label, its WordNet id, or one of its comma-separated names."""
    parts = list[tuple[str, int]]()
    for index, label in enumerate(expand_imagenet_labels(labels)):
        wordnet_id = WORDNET_ID.match(label)
        rest = label[wordnet_id.end() :] if wordnet_id else label
        names = [rest, *rest.split(","), *([wordnet_id.group()] if wordnet_id else [])]
        parts += [(name, index) for name in names]
    return index_unambiguous_names(parts) | index_unambiguous_names(
        [(label, index) for index, label in enumerate(labels)]
    )


def index_unambiguous_names(names: Sequence[tuple[str, int]]) -> dict[str, int]:
    indices_by_name = dict[str, set[int]]()
    for name, index in names:
        indices_by_name.setdefault(normalize_class_name(name), set()).add(index)
    return {name: min(indices) for name, indices in indices_by_name.items() if len(indices) == 1}


def normalize_class_name(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def parse_class_number(name: str, classes: int) -> int | None:
    number = int(name) if name.isdecimal() and len(name) < 10 else classes
    return number if number < classes else None


def are_known_and_distinct(indices: Sequence[int | None]) -> bool:
    return None not in indices and len(set(indices)) == len(indices)


def split_label(label: str) -> list[str]:
    """Names in a label, without its WordNet id: "n01440764 tench, Tinca tinca" → tench, Tinca tinca."""
    wordnet_id = WORDNET_ID.match(label)
    rest = (label[wordnet_id.end() :] if wordnet_id else label).lstrip(" \t:,") or label  # some are only an id
    return [name.strip() for name in rest.split(",") if name.strip()]


def check_class_labels(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    """The labels, if there is one text per class."""
    given: Any = labels
    if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"labels is {repr(labels)[:40]}; expected a list of strings")
    if len(labels) != classes:
        raise ConfigError(f"{len(labels)} labels for {classes} classes; expected one per class")
    return tuple(labels)
