"""A model's answers to a data set: every picture once, as the model is meant to see it."""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from vitrail.checkpoint.report import listed
from vitrail.data.datasets import Pictures
from vitrail.data.foreign import Dataset, Foreign
from vitrail.data.loader import evaluation_batches
from vitrail.data.mixing import normalise
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError, DataError, one_line
from vitrail.train.distributed import Team
from vitrail.train.tally import Evaluation, Tally

WNID = re.compile(r"n\d{8}")  # WordNet's number of a class, as ImageNet's folders are called


def evaluate(
    model: Any,
    pictures: Pictures | Dataset,
    preprocessing: Preprocessing | None = None,
    *,
    batch: int = 64,
    workers: int = 0,
    device: str | torch.device = "cpu",
    mapping: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
    strict: bool = False,
    progress: Callable[[int], object] | None = None,
    team: Team | None = None,
) -> Evaluation:
    """Accuracy, loss, calibration and confusion of a model whose `config` says its classes; its mode is left as it was.

    `mapping` gives the model's class for each class of the data, where they differ; `labels` names the model's classes,
    else the data does. Unreadable pictures are left out and named, or an error if `strict`. `progress` is told after
    each batch how many pictures were in it. In a team each process answers its share, and all get the whole result.
    """
    start, team = perf_counter(), team or Team()
    pictures = pictures if isinstance(pictures, Pictures) else Foreign(pictures)
    preprocessing = preprocessing or plain_preprocessing(model)
    tally, skipped = Tally(model.config.classes), list[str]()
    to_model = None if mapping is None else torch.tensor(mapping)
    with evaluating(model, device), torch.inference_mode():
        number = next(model.parameters()).dtype
        for each in evaluation_batches(
            pictures, preprocessing, batch=batch, workers=workers, rank=team.rank, world=team.world
        ):
            skipped += each.skipped
            if strict and skipped:
                raise DataError(skipped[0])
            if len(each.labels):
                images = normalise(each.images.to(device), preprocessing)
                right = each.labels if to_model is None else to_model[each.labels]
                answers = [pictures.answers(index) for index in each.indices.tolist()]
                tally.add(model(images.to(number)), right, answers)
            if progress is not None:
                progress(len(each.labels) + len(each.skipped))
    if team.world > 1:
        share, tally = tally.state(), Tally(tally.classes)
        tally.add_state(team.total(share.to(device)))
    names = labels or names_of(pictures.classes, mapping, tally.classes)
    return tally.result(names, skipped=skipped, seconds=perf_counter() - start)


def plain_preprocessing(model: Any) -> Preprocessing:
    """For a model of which nothing else is known: the whole picture, pixels from −1 to 1."""
    config: Any = getattr(model, "config", None)
    if not all(hasattr(config, name) for name in ("image_size", "channels", "classes")):
        kind = type(model).__name__
        raise ConfigError(f"{kind} has no config; expected a model with its image_size, channels and classes in it")
    grey = (0.5,) * config.channels
    return Preprocessing(image_size=config.image_size, crop=1.0, mean=grey, std=grey)


@contextmanager
def evaluating(model: nn.Module, device: str | torch.device) -> Generator[None]:
    """On the device and in eval mode; afterwards each module is in the mode it was, also where they differ."""
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
        raise ConfigError(f"device is {str(device)!r}; expected one that torch can use: {one_line(error)}") from None
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def names_of(data_classes: Sequence[str], mapping: Sequence[int] | None, classes: int) -> list[str]:
    """Names for the model's classes: the data's, and numbers for those that the data does not have."""
    names = [str(index) for index in range(classes)]
    for index, name in zip(mapping or range(classes), data_classes, strict=False):
        names[index] = name
    return names


def class_mapping(
    model_labels: Sequence[str] | None, model_classes: int, data_classes: Sequence[str]
) -> tuple[tuple[int, ...], str]:
    """The model's class of each class of the data, and a note for the user where it does not follow from names.

    By name, also by one of several ("tench, Tinca tinca"); by number where the data's classes are called 0 … 999; in
    order where there are as many of both and the model's have no names, or the data's are WordNet's numbers.
    """
    by_name = classes_by_name(model_labels or ())
    found = [by_name.get(plain(name)) for name in data_classes]
    if all_different(found):
        return tuple(index for index in found if index is not None), ""
    numbers = [number_of(name, model_classes) for name in data_classes]
    if all_different(numbers):
        first = f", so {data_classes[0]} is {model_labels[numbers[0] or 0]}" if model_labels else ""
        return tuple(n for n in numbers if n is not None), f"classes by number: the data's names are the model's{first}"
    if len(data_classes) == model_classes and (not model_labels or all(map(WNID.fullmatch, data_classes))):
        why = "the model's classes have no names" if not model_labels else "the data's classes are WordNet's numbers"
        return tuple(range(model_classes)), f"{why}: taken in order, {data_classes[0]} as class 0"
    strange = [name for name, index in zip(data_classes, found, strict=True) if index is None] or data_classes
    given = f"{len(strange)} of the data's {len(data_classes)} classes ({listed(strange, 3)})"
    known = f"{model_classes} ({listed(model_labels, 3)})" if model_labels else f"{model_classes}, which have no names"
    hint = "train the model on this data first, or name its classes with vitrail convert --labels"
    raise DataError(f"{given} are none of the model's {known}; expected the same classes: {hint}")


def classes_by_name(labels: Sequence[str]) -> dict[str, int]:
    """Every name that means one class only: a whole label, else its WordNet number or what stands between commas."""
    parts = list[tuple[str, int]]()
    for index, label in enumerate(labels):
        number = WNID.match(label)
        rest = label[number.end() :] if number else label
        names = [rest, *rest.split(","), *([number.group()] if number else [])]
        parts += [(name, index) for name in names]
    return unambiguous(parts) | unambiguous([(label, index) for index, label in enumerate(labels)])


def unambiguous(names: Sequence[tuple[str, int]]) -> dict[str, int]:
    meant = dict[str, set[int]]()
    for name, index in names:
        meant.setdefault(plain(name), set()).add(index)
    return {name: min(indices) for name, indices in meant.items() if len(indices) == 1}


def plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def number_of(name: str, classes: int) -> int | None:
    number = int(name) if name.isdecimal() and len(name) < 10 else classes
    return number if number < classes else None


def all_different(indices: Sequence[int | None]) -> bool:
    return None not in indices and len(set(indices)) == len(indices)
