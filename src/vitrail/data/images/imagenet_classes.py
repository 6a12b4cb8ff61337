"""The 1,000 classes of ImageNet-1k: WordNet ids and names, in the order of the classes.

The first name is the label. Where the first names of two classes are equal, imagenet_classes.txt has another name
first: tank suit, Cardigan Welsh corgi, crane (bird) and crane (machine).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

IMAGENET = "imagenet"  # as labels: the names of its classes
CLASSES_FILE = Path(__file__).with_name("imagenet_classes.txt")


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
