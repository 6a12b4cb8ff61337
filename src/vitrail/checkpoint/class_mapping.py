"""Which class is meant: by name, by one of several names, by WordNet's number, by its own."""

import re
from collections.abc import Sequence
from typing import Any

from vitrail.checkpoint.load_report import abbreviate_list
from vitrail.errors import ConfigError, DataError

WORDNET_ID = re.compile(r"n\d{8}")  # WordNet's number of a class, as ImageNet's folders are called


def map_classes(
    model_labels: Sequence[str] | None, model_classes: int, data_classes: Sequence[str]
) -> tuple[tuple[int, ...], str]:
    """The model's class of each class of the data, and a note for the user where it does not follow from names.

    By name, also by one of several ("tench, Tinca tinca"); by number where the data's classes are called 0 … 999; in
    order where there are as many of both and the model's have no names, or the data's are WordNet's numbers.
    """
    by_name = index_classes_by_name(model_labels or ())
    found = [by_name.get(normalise_class_name(name)) for name in data_classes]
    if are_known_and_distinct(found):
        return tuple(index for index in found if index is not None), ""
    numbers = [parse_class_number(name, model_classes) for name in data_classes]
    if are_known_and_distinct(numbers):
        first = f", so {data_classes[0]} is {model_labels[numbers[0] or 0]}" if model_labels else ""
        return tuple(n for n in numbers if n is not None), f"classes by number: the data's names are the model's{first}"
    if len(data_classes) == model_classes and (not model_labels or all(map(WORDNET_ID.fullmatch, data_classes))):
        why = "the model's classes have no names" if not model_labels else "the data's classes are WordNet's numbers"
        return tuple(range(model_classes)), f"{why}: taken in order, {data_classes[0]} as class 0"
    strange = [name for name, index in zip(data_classes, found, strict=True) if index is None] or data_classes
    given = f"{len(strange)} of the data's {len(data_classes)} classes ({abbreviate_list(strange, 3)})"
    known = (
        f"{model_classes} ({abbreviate_list(model_labels, 3)})"
        if model_labels
        else f"{model_classes}, which have no names"
    )
    hint = "train the model on this data first, or name its classes with vitrail convert --labels"
    raise DataError(f"{given} are none of the model's {known}; expected the same classes: {hint}")


def index_classes_by_name(labels: Sequence[str]) -> dict[str, int]:
    """Every name that means one class only: a whole label, else its WordNet number or what stands between commas."""
    parts = list[tuple[str, int]]()
    for index, label in enumerate(labels):
        number = WORDNET_ID.match(label)
        rest = label[number.end() :] if number else label
        names = [rest, *rest.split(","), *([number.group()] if number else [])]
        parts += [(name, index) for name in names]
    return drop_ambiguous_names(parts) | drop_ambiguous_names([(label, index) for index, label in enumerate(labels)])


def drop_ambiguous_names(names: Sequence[tuple[str, int]]) -> dict[str, int]:
    meant = dict[str, set[int]]()
    for name, index in names:
        meant.setdefault(normalise_class_name(name), set()).add(index)
    return {name: min(indices) for name, indices in meant.items() if len(indices) == 1}


def normalise_class_name(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def parse_class_number(name: str, classes: int) -> int | None:
    number = int(name) if name.isdecimal() and len(name) < 10 else classes
    return number if number < classes else None


def are_known_and_distinct(indices: Sequence[int | None]) -> bool:
    return None not in indices and len(set(indices)) == len(indices)


def split_label(label: str) -> list[str]:
    """All that a label lists, without WordNet's number: "n01440764 tench, Tinca tinca" → tench, Tinca tinca."""
    number = WORDNET_ID.match(label)
    rest = (label[number.end() :] if number else label).lstrip(" \t:,") or label  # some have nothing but the number
    return [name.strip() for name in rest.split(",") if name.strip()]


def check_class_labels(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    """The labels, if there is one text per class."""
    given: Any = labels
    if isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"labels is {repr(labels)[:40]}; expected a list of texts")
    if len(labels) != classes:
        raise ConfigError(f"{len(labels)} labels for {classes} classes; expected one per class")
    return tuple(labels)
