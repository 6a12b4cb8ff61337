"""Pictures in files: a folder for each class, perhaps below train/ and val/."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

from PIL import Image

from vitrail.data.arrays import labels_in_range
from vitrail.data.images import open_image
from vitrail.data.real import Answers, answers_for
from vitrail.errors import DataError, one_line

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TRAIN = ("train", "training")
VAL = ("val", "valid", "validation", "test", "testing")  # the first there is
UNLABELLED = ("test", "testing")  # competitions keep the labels of these to themselves
CLASS_FOLDERS = f"a folder for each class with pictures in it ({', '.join(ENDINGS)})"


class Files:
    """Pictures in files below `root`, none opened before it is asked for.

    `paths` are relative to the root, and a split goes by them; `real` has the ReaL labels of each, where there are any.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        labels: Any,
        classes: Sequence[str],
        real: Sequence[Answers] | None = None,
        root: str | Path = "",
    ) -> None:
        self.root = Path(root)
        self.paths = tuple(str(path) for path in paths)
        self.classes = tuple(classes)
        self.labels = labels_in_range(labels, len(self.classes), "the files")
        self.real = real
        if len(self.labels) != len(self.paths):
            raise DataError(f"{len(self.paths)} files and {len(self.labels)} labels; expected as many of each")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.source(index)), self.label(index)

    def source(self, index: int) -> Path:
        return self.root / self.paths[index]

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return str(self.source(index))

    def answers(self, index: int) -> Answers:
        return None if self.real is None else self.real[index]


@dataclass
class Found:
    """What lies in a folder of class folders."""

    where: Path
    pictures: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # class → files, relative to `where`
    loose: int = 0  # pictures outside the class folders
    others: list[str] = field(default_factory=list[str])  # files that are no pictures

    @property
    def classes(self) -> tuple[str, ...]:
        """Those with pictures, sorted; by number where all are numbers."""
        names = [name for name, files in self.pictures.items() if files]
        if all(name.isascii() and name.isdigit() for name in names):
            return tuple(sorted(names, key=lambda name: (int(name), name)))
        return tuple(sorted(names))

    def files(self, classes: tuple[str, ...], real: list[tuple[int, ...]] | None) -> Files:
        paths = [file for name in classes for file in self.pictures.get(name, ())]
        labels = [label for label, name in enumerate(classes) for _ in self.pictures.get(name, ())]
        return Files(paths, labels, classes, answers_for(paths, real) if real else None, self.where)

    def notes(self) -> Iterator[str]:
        empty = sorted(name for name, files in self.pictures.items() if not files)
        if empty:
            yield f"{self.where}: no pictures in {listed(empty)}; left out"
        if self.loose:
            yield f"{self.where}: {self.loose} pictures lie outside the class folders; left out"
        if self.others:
            yield f"{self.where}: {len(self.others)} files are no pictures, say {min(self.others)!r}; left out"


def read_folder(root: Path, real: list[tuple[int, ...]] | None) -> tuple[Files | None, Files | None, list[str]]:
    """Training and validation, and notes for the user; all is training where nothing says what is validation."""
    below = [Path(path) for _, path, is_folder in entries(root) if is_folder]
    if len(below) == 1 and below[0].name.lower() not in (*TRAIN, *VAL) and has_folders(below[0]):
        root = below[0]  # an archive unpacked into a folder of its name has all in one more
    train, val, notes = parts(root)
    found = [scan(place) for place in (train, val) if place]
    notes += [note for each in found for note in each.notes()]
    classes = found[0].classes
    if len(found) == 2:
        notes += compare(*found)
    files = [each.files(classes, real) for each in found]
    return files[0] if train else None, files[-1] if val else None, notes


def parts(root: Path) -> tuple[Path | None, Path | None, list[str]]:
    """The folders of training and validation; a folder of class folders is all training."""
    folders = {name.lower(): Path(path) for name, path, is_folder in entries(root) if is_folder}
    train, *_ = *(folders[name] for name in TRAIN if name in folders), None
    validation = [name for name in VAL if name in folders]
    named = [folders[name] for name in (*TRAIN, *VAL) if name in folders]
    # a class may be called train, too: but it has no classes in it
    if not named or not (any(has_folders(folder) for folder in named) or len(named) == len(folders)):
        return root, None, []
    labelled = [name for name in validation if has_folders(folders[name]) or not train or name not in UNLABELLED]
    val = folders[labelled[0]] if labelled else None
    unused = sorted(folder.name for folder in folders.values() if folder not in (train, val))
    return train, val, [f"{root}: {listed(unused)} not used"] if unused else []


def has_folders(folder: Path) -> bool:
    return any(is_folder for _, _, is_folder in entries(folder))


def scan(where: Path) -> Found:
    """All pictures by class, in folders of any depth."""
    found = Found(where)
    top = (str(where.resolve()),)
    for name, path, is_folder in entries(where):
        if is_folder:
            files = found.pictures.setdefault(normalize("NFC", name), [])
            for file in walk(path, name, top):
                (files if is_picture(file) else found.others).append(file)
        elif is_picture(name):
            found.loose += 1
        else:
            found.others.append(name)
    if found.loose and not found.classes:
        raise DataError(f"{where} holds {found.loose} pictures but no class folders; expected {CLASS_FOLDERS}")
    if not found.classes:
        raise DataError(f"{where} holds no pictures; expected {CLASS_FOLDERS}")
    return found


def walk(folder: str, relative: str, above: tuple[str, ...], links: "Links | None" = None) -> Iterator[str]:
    """Every file below, but nothing twice for a link that leads back to where it lies."""
    real, links = str(Path(folder).resolve()), links or Links()
    if real in above:
        return
    for name, path, is_folder in entries(folder):
        if is_folder:
            inside = links.follow(path)
            if inside is not None:
                yield from walk(path, f"{relative}/{name}", (*above, real), inside)
        else:
            yield f"{relative}/{name}"


class Links:
    """Follows a folder that is linked from within a linked one only once: by two links in each of thirty folders there
    would be a billion ways through them.
    """

    def __init__(self, followed: set[str] | None = None, *, behind: bool = False) -> None:
        self.followed = set[str]() if followed is None else followed
        self.behind = behind  # whether the way here leads through a link

    def follow(self, folder: str) -> "Links | None":
        """What is to be used inside a folder, None if that is not to be entered again."""
        if not os.path.islink(folder):  # noqa: PTH114  # a million times
            return self
        if self.behind:
            real = os.path.realpath(folder)
            if real in self.followed:
                return None
            self.followed.add(real)
        return Links(self.followed, behind=True)


def entries(folder: str | Path) -> list[tuple[str, str, bool]]:
    """Name, path and whether it is a folder, of all that is not hidden; sorted."""
    try:
        with os.scandir(folder) as found:
            return sorted((each.name, each.path, is_folder(each)) for each in found if not each.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {one_line(error)}; expected a folder that may be read") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def is_picture(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def compare(train: Found, val: Found) -> Iterator[str]:
    """Notes what is scarce; a class that is never learnt is refused."""
    learnt, validated = train.classes, val.classes
    only = sorted(set(validated) - set(learnt))
    if only:
        expected = f"expected no class that {train.where} has no pictures of: move some there, or take these away"
        raise DataError(f"{val.where} has pictures of {listed(only)}; {expected}")
    missing = sorted(set(learnt) - set(validated))
    if missing:
        yield f"{val.where}: no pictures of {listed(missing)}; they are not validated"
    single = [name for name in learnt if len(train.pictures[name]) == 1]
    if single:
        yield f"{train.where}: only one picture of {listed(single)}"


def listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
