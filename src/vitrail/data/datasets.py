"""A data set by its name, its folder or as an object: pictures for training and for validation, with their classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vitrail.data import cifar, fashion, idx
from vitrail.data.arrays import Arrays
from vitrail.data.folders import Files, entries, listed, read_folder
from vitrail.data.foreign import Dataset, Foreign
from vitrail.data.real import read_real
from vitrail.data.split import check_share, held_out
from vitrail.errors import DataError, one_line

NAMES = ("fashion",)  # of the data sets in the package
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
EXPECTED = (
    "expected 'fashion', or a folder: with a folder for each class, with train and val of such folders, "
    "or with the files of CIFAR-10, CIFAR-100 or MNIST"
)


@runtime_checkable
class Pictures(Protocol):
    """A data set of ours: it also tells of a picture without decoding it."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Any, int]: ...
    def source(self, index: int, /) -> Any: ...  # what open_image takes: a path, or uint8 (H, W, C)
    def label(self, index: int, /) -> int: ...
    def name(self, index: int, /) -> str: ...  # for messages
    def answers(self, index: int, /) -> tuple[int, ...] | None: ...  # all that are right, where ReaL says so


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on and what is validated, and what the user should know of it."""

    name: str
    train: Pictures | None
    val: Pictures | None
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in ("train", "val"):  # torchvision's data sets, say
            given: Any = getattr(self, part)
            if given is not None and not isinstance(given, Pictures):
                object.__setattr__(self, part, Foreign(given))


class Subset:
    """Some pictures of others."""

    def __init__(self, pictures: Pictures, indices: Sequence[int] | NDArray[np.int64]) -> None:
        inner = isinstance(pictures, Subset)
        self.pictures: Pictures = pictures.pictures if inner else pictures
        self.indices = pictures.indices[np.asarray(indices, np.int64)] if inner else np.asarray(indices, np.int64)
        self.classes = pictures.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.pictures[int(self.indices[index])]

    def source(self, index: int) -> Any:
        return self.pictures.source(int(self.indices[index]))

    def label(self, index: int) -> int:
        return self.pictures.label(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.pictures.name(int(self.indices[index]))

    def answers(self, index: int) -> tuple[int, ...] | None:
        return self.pictures.answers(int(self.indices[index]))


def open_data(
    where: str | Path | Dataset | Data, *, seed: int = 0, val_share: float = 0.2, real: str | Path | None = None
) -> Data:
    """The data set called so, in this folder, or made of these pictures; `real` is the file of ImageNet's ReaL labels.

    What has no validation of its own is split by the seed: `val_share` of each class, 0 for none and 1 for all.
    """
    check_share(val_share)
    if isinstance(where, Data):
        return where
    answers = None if real is None else read_real(Path(real))
    train: Pictures | None
    val: Pictures | None
    if isinstance(where, str) and where in NAMES:
        name, (train, val), notes = where, fashion.read(), list[str]()
    elif isinstance(where, str | Path):
        root = existing(where)
        name = root.resolve().name
        train, val, notes = read(root, answers)
    elif hasattr(where, "__len__") and hasattr(where, "__getitem__"):
        name, val, notes = type(where).__name__, None, []
        train = where if isinstance(where, Pictures) else Foreign(where)
    else:
        raise DataError(f"the data is a {type(where).__name__}; {EXPECTED}, or an object such as torchvision's")
    if any(each is not None and not len(each) for each in (train, val)):
        raise DataError(f"{name} has no pictures in it; expected some")
    if answers is not None and not any(has_answers(each) for each in (train, val)):
        raise DataError(f"{real} has ReaL labels, but not for {name}; expected pictures ILSVRC2012_val_….JPEG there")
    if train is not None and val is None:
        train, val, more = split(train, seed, val_share)
        notes += [f"{name}: {note}" for note in more]
    classes = next(each.classes for each in (train, val) if each is not None)
    if len(classes) == 1:
        notes.append(f"{name}: only one class, {classes[0]!r}; there is nothing to tell apart")
    return Data(name=name, train=train, val=val, classes=classes, notes=tuple(map(printable, notes)))


def printable(note: str) -> str:
    """On one line, whatever the names of folders hold."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in note)


def existing(where: str | Path) -> Path:
    """The folder; what is none is refused, with the name that was perhaps meant."""
    path = Path(where)
    try:
        if path.is_dir() and str(where):
            return path
        is_there = path.exists() and str(where)
        beside = [str(path.parent / each.name) for each in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; {EXPECTED}") from None
    if is_there:
        packed = ": unpack it first" if path.name.lower().endswith(ARCHIVES) else ""
        raise DataError(f"{path} is a file; {EXPECTED}{packed}")
    near = get_close_matches(str(path), [*NAMES, *beside], n=1, cutoff=0.7)
    raise DataError(f"{str(where)!r} does not exist; {EXPECTED}{f': did you mean {near[0]!r}?' if near else ''}")


def read(root: Path, real: list[tuple[int, ...]] | None) -> tuple[Pictures | None, Pictures | None, list[str]]:
    """A folder of whatever layout, found there or one folder below."""
    below = [Path(path) for _, path, is_folder in entries(root) if is_folder]
    found = [root] if is_published(root) else [folder for folder in below if is_published(folder)]
    if len(found) > 1:
        raise DataError(f"{root} holds {len(found)} data sets; expected one: give {found[0]} or {found[1]}")
    if not found:
        return read_folder(root, real)
    layout = cifar.find(found[0])
    return cifar.read(found[0], layout) if layout else (*idx.read(found[0]), [])


def is_published(folder: Path) -> bool:
    return bool(cifar.find(folder) or idx.find(folder))


def has_answers(pictures: Pictures | None) -> bool:
    return pictures is not None and any(pictures.answers(index) is not None for index in range(len(pictures)))


def split(pictures: Pictures, seed: int, share: float) -> tuple[Pictures | None, Pictures | None, list[str]]:
    """Training and validation, None for no pictures, and notes; files go by their names, others by their numbers."""
    names = pictures.paths if isinstance(pictures, Files) else [str(index) for index in range(len(pictures))]
    labels = np.array([pictures.label(index) for index in range(len(pictures))], np.int64)
    held = held_out(names, labels, seed=seed, share=share)
    train, val = (some_of(pictures, np.flatnonzero(part)) if part.any() else None for part in (~held, held))
    if share in (0, 1):
        return train, val, []
    single = [pictures.classes[label] for label in np.flatnonzero(np.bincount(labels) == 1)]
    notes = [f"only one picture of {listed(single)}; not validated"] if single else []
    return train, val, [*notes, f"{held.sum()} of {len(held)} pictures held out for validation, by seed {seed}"]


def some_of(pictures: Pictures, indices: NDArray[np.int64]) -> Pictures:
    """Arrays stay arrays, which go to batches all at once."""
    if isinstance(pictures, Arrays):
        return Arrays(pictures.images[indices], pictures.labels[indices], pictures.classes, pictures.of)
    return Subset(pictures, indices)
