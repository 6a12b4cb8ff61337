"""CIFAR-10 and CIFAR-100 as they are published: the binary files, and the pickled ones for Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.array_pickles import read_pickle
from vitrail.data.arrays import Arrays, labels_in_range
from vitrail.errors import DataError, one_line
from vitrail.files import read_bytes

SIDE = 32
LARGEST_FILE = 2**30  # bytes; CIFAR-100's largest has 155 million
PIXELS = 3 * SIDE * SIDE  # of a picture: the reds row by row, the greens, the blues


@dataclass(frozen=True)
class Layout:
    """One of the four ways the two are published."""

    classes: int
    train: tuple[str, ...]
    val: str
    names: str  # the file with the names of the classes
    label_bytes: int = 0  # in front of each picture, of which the last counts; 0 for pickles
    labels_key: str = ""  # of pickles
    names_key: str = ""

    def is_in(self, folder: Path) -> bool:
        """Any of its pictures; CIFAR-100's files have such plain names that its classes must be there, too."""
        pictures = any((folder / name).is_file() for name in (*self.train, self.val))
        return pictures and (self.classes == 10 or (folder / self.names).is_file())


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = (
    Layout(10, tuple(f"{name}.bin" for name in BATCHES), "test_batch.bin", "batches.meta.txt", label_bytes=1),
    Layout(10, BATCHES, "test_batch", "batches.meta", labels_key="labels", names_key="label_names"),
    Layout(100, ("train.bin",), "test.bin", "fine_label_names.txt", label_bytes=2),
    Layout(100, ("train",), "test", "meta", labels_key="fine_labels", names_key="fine_label_names"),
)


def find(folder: Path) -> Layout | None:
    return next((layout for layout in LAYOUTS if layout.is_in(folder)), None)


def read(folder: Path, layout: Layout) -> tuple[Arrays | None, Arrays | None, list[str]]:
    """Training and validation, what there is of them, and what is missing."""
    notes = [f"{folder / name} is missing" for name in layout.train if not (folder / name).is_file()]
    classes = tuple(str(number) for number in range(layout.classes))
    if (folder / layout.names).is_file():
        classes = read_names(folder / layout.names, layout)
    else:
        notes.append(f"{folder / layout.names} is missing: the classes are called by their numbers")
    train, val = (read_part(folder, names, layout, classes) for names in (layout.train, (layout.val,)))
    return train, val, notes


def read_part(folder: Path, names: tuple[str, ...], layout: Layout, classes: tuple[str, ...]) -> Arrays | None:
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        return None
    parts = [read_binary(file, layout) if layout.label_bytes else read_batch(file, layout) for file in files]
    labels = [labels_in_range(part[1], layout.classes, str(file)) for file, part in zip(files, parts, strict=True)]
    colours = np.split(np.concatenate([part[0] for part in parts]), 3, axis=1)
    images = np.stack(colours, axis=-1)  # three times as fast as a transposition
    return Arrays(images.reshape(-1, SIDE, SIDE, 3), np.concatenate(labels), classes, f"{folder} ({names[0]})")


def read_binary(path: Path, layout: Layout) -> tuple[NDArray[np.uint8], Any]:
    """Pictures as stored, (N, 3072), and labels."""
    record = layout.label_bytes + PIXELS
    data = np.frombuffer(bytes_of(path), np.uint8)
    if not len(data) or len(data) % record:
        raise DataError(f"{path} has {len(data)} bytes; expected a multiple of {record}: is it cut off?")
    records = data.reshape(-1, record)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]


def read_batch(path: Path, layout: Layout) -> tuple[NDArray[np.uint8], Any]:
    batch = contents(path)
    images: Any = batch.get("data")
    labels: Any = batch.get(layout.labels_key)
    if not isinstance(images, np.ndarray) or images.shape[1:] != (PIXELS,) or not is_list_of(labels, int):
        raise DataError(f"{path} has no pictures; expected 'data' of bytes (N, {PIXELS}) and '{layout.labels_key}'")
    if len(labels) != len(images):
        raise DataError(f"{path} has {len(images)} pictures and {len(labels)} labels; expected as many of each")
    return images, labels


def read_names(path: Path, layout: Layout) -> tuple[str, ...]:
    if layout.label_bytes:
        names = bytes_of(path).decode("utf-8", "replace").split("\n")
    else:
        listed: Any = contents(path).get(layout.names_key)
        names = [text(name) for name in listed] if is_list_of(listed, str, bytes) else []
    names = [name.strip() for name in names if name.strip()]
    if len(names) != layout.classes:
        raise DataError(f"{path} has {len(names)} names of classes; expected {layout.classes}")
    return tuple(names)


def contents(path: Path) -> Mapping[str, Any]:
    """The dictionary in a pickle; Python 2 wrote its keys as bytes."""
    read: Any = read_pickle(bytes_of(path), path)
    if not isinstance(read, dict):
        raise DataError(f"{path} holds a {type(read).__name__}; expected the dictionary of a CIFAR batch")
    return {text(key): value for key, value in read.items() if isinstance(key, str | bytes)}


def is_list_of(values: Any, *kinds: type) -> bool:
    """Whether it is a flat list of these types; a list nested in itself would make an endless array."""
    return isinstance(values, list) and all(type(value) in kinds for value in values)


def text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def bytes_of(path: Path) -> bytes:
    try:
        return read_bytes(path, LARGEST_FILE)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; expected a file that may be read") from None
