"""Pictures in files: a folder for each class, perhaps below train/ and val/."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

from PIL import Image

from vitrail.data.array_dataset import check_label_range
from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.formats.imagenet_real import RealLabels, match_real_labels
from vitrail.errors import DataError, describe_error
from vitrail.text import abbreviate_list

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TRAIN_FOLDER_NAMES = ("train", "training")
VAL_FOLDER_NAMES = ("val", "valid", "validation", "test", "testing")  # the first there is
UNLABELLED_FOLDER_NAMES = ("test", "testing")  # competitions keep the labels of these to themselves
EXPECTED_CLASS_FOLDERS = f"a folder for each class with pictures in it ({', '.join(IMAGE_SUFFIXES)})"


class FileDataset:
    """Pictures in files below `root`, none opened before it is asked for.

    `paths` are relative to the root, and a split goes by them; `real` has the ReaL labels of each, where there are any.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        labels: Any,
        classes: Sequence[str],
        real: Sequence[RealLabels] | None = None,
        root: str | Path = "",
    ) -> None:
        self.root = Path(root)
        self.paths = tuple(str(path) for path in paths)
        self.classes = tuple(classes)
        self.labels = check_label_range(labels, len(self.classes), "the files")
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

    def real_labels(self, index: int) -> RealLabels:
        return None if self.real is None else self.real[index]


@dataclass
class ClassFolderScan:
    """What lies in a folder of class folders."""

    folder: Path
    images_by_class: dict[str, list[str]] = field(
        default_factory=dict[str, list[str]]
    )  # class → files, relative to `where`
    images_outside: int = 0  # pictures outside the class folders
    other_files: list[str] = field(default_factory=list[str])  # files that are no pictures

    @property
    def classes(self) -> tuple[str, ...]:
        """Those with pictures, sorted; by number where all are numbers."""
        names = [name for name, files in self.images_by_class.items() if files]
        if all(name.isascii() and name.isdigit() for name in names):
            return tuple(sorted(names, key=lambda name: (int(name), name)))
        return tuple(sorted(names))

    def to_dataset(self, classes: tuple[str, ...], real: list[tuple[int, ...]] | None) -> FileDataset:
        paths = [file for name in classes for file in self.images_by_class.get(name, ())]
        labels = [label for label, name in enumerate(classes) for _ in self.images_by_class.get(name, ())]
        return FileDataset(paths, labels, classes, match_real_labels(paths, real) if real else None, self.folder)

    def make_notes(self) -> Iterator[str]:
        empty = sorted(name for name, files in self.images_by_class.items() if not files)
        if empty:
            yield f"{self.folder}: no pictures in {join_names(empty)}; left out"
        if self.images_outside:
            yield f"{self.folder}: {self.images_outside} pictures lie outside the class folders; left out"
        if self.other_files:
            yield f"{self.folder}: {len(self.other_files)} files are not images, say {min(self.other_files)!r}; skipped"


def read_class_folders(
    root: Path, real: list[tuple[int, ...]] | None
) -> tuple[FileDataset | None, FileDataset | None, list[str]]:
    """Training and validation, and notes for the user; all is training where nothing says what is validation."""
    below = [Path(path) for _, path, is_folder in list_entries(root) if is_folder]
    if (
        len(below) == 1
        and below[0].name.lower() not in (*TRAIN_FOLDER_NAMES, *VAL_FOLDER_NAMES)
        and has_subfolders(below[0])
    ):
        root = below[0]  # an archive unpacked into a folder of its name has all in one more
    train, val, notes = find_train_and_val_folders(root)
    found = [scan_class_folders(place) for place in (train, val) if place]
    notes += [note for each in found for note in each.make_notes()]
    classes = found[0].classes
    if len(found) == 2:
        notes += compare_train_and_val_classes(*found)
    files = [each.to_dataset(classes, real) for each in found]
    return files[0] if train else None, files[-1] if val else None, notes


def find_train_and_val_folders(root: Path) -> tuple[Path | None, Path | None, list[str]]:
    """The folders of training and validation; a folder of class folders is all training."""
    folders = {name.lower(): Path(path) for name, path, is_folder in list_entries(root) if is_folder}
    train, *_ = *(folders[name] for name in TRAIN_FOLDER_NAMES if name in folders), None
    validation = [name for name in VAL_FOLDER_NAMES if name in folders]
    named = [folders[name] for name in (*TRAIN_FOLDER_NAMES, *VAL_FOLDER_NAMES) if name in folders]
    # a class may be called train, too: but it has no classes in it
    if not named or not (any(has_subfolders(folder) for folder in named) or len(named) == len(folders)):
        return root, None, []
    labelled = [
        name for name in validation if has_subfolders(folders[name]) or not train or name not in UNLABELLED_FOLDER_NAMES
    ]
    val = folders[labelled[0]] if labelled else None
    unused = sorted(folder.name for folder in folders.values() if folder not in (train, val))
    return train, val, [f"{root}: {join_names(unused)} not used"] if unused else []


def has_subfolders(folder: Path) -> bool:
    return any(is_folder for _, _, is_folder in list_entries(folder))


def scan_class_folders(where: Path) -> ClassFolderScan:
    """All pictures by class, in folders of any depth."""
    found = ClassFolderScan(where)
    top = (str(where.resolve()),)
    for name, path, is_folder in list_entries(where):
        if is_folder:
            files = found.images_by_class.setdefault(normalize("NFC", name), [])
            for file in walk_files(path, name, top):
                (files if is_image_name(file) else found.other_files).append(file)
        elif is_image_name(name):
            found.images_outside += 1
        else:
            found.other_files.append(name)
    if found.images_outside and not found.classes:
        raise DataError(
            f"{where} holds {found.images_outside} pictures but no class folders; expected {EXPECTED_CLASS_FOLDERS}"
        )
    if not found.classes:
        raise DataError(f"{where} holds no pictures; expected {EXPECTED_CLASS_FOLDERS}")
    return found


def walk_files(
    folder: str, relative: str, above: tuple[str, ...], links: "SymlinkGuard | None" = None
) -> Iterator[str]:
    """Every file below, but nothing twice for a link that leads back to where it lies."""
    real, links = str(Path(folder).resolve()), links or SymlinkGuard()
    if real in above:
        return
    for name, path, is_folder in list_entries(folder):
        if is_folder:
            inside = links.follow(path)
            if inside is not None:
                yield from walk_files(path, f"{relative}/{name}", (*above, real), inside)
        else:
            yield f"{relative}/{name}"


class SymlinkGuard:
    """Follows a folder that is linked from within a linked one only once: by two links in each of thirty folders there
    would be a billion ways through them.
    """

    def __init__(self, followed: set[str] | None = None, *, behind: bool = False) -> None:
        self.followed = set[str]() if followed is None else followed
        self.inside_link = behind  # whether the way here leads through a link

    def follow(self, folder: str) -> "SymlinkGuard | None":
        """What is to be used inside a folder, None if that is not to be entered again."""
        if not os.path.islink(folder):  # noqa: PTH114  # a million times
            return self
        if self.inside_link:
            real = os.path.realpath(folder)
            if real in self.followed:
                return None
            self.followed.add(real)
        return SymlinkGuard(self.followed, behind=True)


def list_entries(folder: str | Path) -> list[tuple[str, str, bool]]:
    """Name, path and whether it is a folder, of all that is not hidden; sorted."""
    try:
        with os.scandir(folder) as found:
            return sorted((each.name, each.path, is_folder(each)) for each in found if not each.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read: {describe_error(error)}; expected a folder that may be read"
        ) from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def compare_train_and_val_classes(train: ClassFolderScan, val: ClassFolderScan) -> Iterator[str]:
    """Notes what is scarce; a class that is never learnt is refused."""
    learnt, validated = train.classes, val.classes
    only = sorted(set(validated) - set(learnt))
    if only:
        expected = f"expected no class that {train.folder} has no pictures of: move some there, or take these away"
        raise DataError(f"{val.folder} has pictures of {join_names(only)}; {expected}")
    missing = sorted(set(learnt) - set(validated))
    if missing:
        yield f"{val.folder}: no pictures of {join_names(missing)}; they are not validated"
    single = [name for name in learnt if len(train.images_by_class[name]) == 1]
    if single:
        yield f"{train.folder}: only one picture of {join_names(single)}"


def join_names(names: Sequence[str], most: int = 5) -> str:
    return abbreviate_list([repr(name) for name in names], most)
