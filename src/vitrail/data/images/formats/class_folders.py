"""Image files in one folder per class, or without classes, optionally below train/ and val/.

The validation images of ImageNet may have ReaL labels, all correct classes of each: Beyer et al., "Are we done with
ImageNet?" (2020); the file is real.json of google-research/reassessed-imagenet.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

from PIL import Image

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_text
from vitrail.base.json_yaml import parse_json
from vitrail.base.text import abbreviate_list, format_count
from vitrail.data.images.array_dataset import NO_LABEL, check_label_range
from vitrail.data.images.decoding.rgb_image import open_image

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


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TRAIN_FOLDER_NAMES = ("train", "training")
VAL_FOLDER_NAMES = ("val", "valid", "validation", "test", "testing")  # the first one that exists is used
UNLABELED_FOLDER_NAMES = ("test", "testing")  # test sets of competitions have no labels
EXPECTED_CLASS_FOLDERS = f"one folder of images per class ({', '.join(IMAGE_SUFFIXES)})"


class FileDataset:
    """Image files below `root`, opened on access.

    `paths` are relative to the root; the validation split depends on them. `labels` are None without classes. `real`
    has the ReaL labels, if any.
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
        labels = [NO_LABEL] * len(self.paths) if labels is None else labels
        self.labels = check_label_range(labels, len(self.classes), "the files")
        self.real = real
        if len(self.labels) != len(self.paths):
            raise DataError(f"{len(self.paths)} files and {len(self.labels)} labels; expected one label per file")

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
    """The files in a folder of class folders."""

    folder: Path
    images_by_class: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # paths relative to `folder`
    images_outside: int = 0  # images outside the class folders
    other_files: list[str] = field(default_factory=list[str])  # files that are not images

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of classes with images, sorted; by value if all are numbers."""
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
            yield f"{self.folder}: no images in {quote_names(empty)}; skipped"
        if self.images_outside:
            yield f"{self.folder}: skipped {format_count(self.images_outside, 'image')} outside the class folders"
        yield from note_other_files(self.folder, self.other_files)


def note_other_files(folder: Path, files: Sequence[str]) -> Iterator[str]:
    if files:
        count = format_count(len(files), "file")
        yield f"{folder}: skipped {count} other than images, for example {min(files)!r}"


def read_class_folders(
    root: Path, real: list[tuple[int, ...]] | None, *, need_classes: bool = True
) -> tuple[FileDataset | None, FileDataset | None, list[str]]:
    """Training images, validation images and notes; without a validation folder all images are for training.

    Unless classes are needed, a folder that holds images itself has none: all images in it and below are used. The same
    holds if there are images of a class in the validation folder only. Other folders are read as class folders.
    """
    subfolders = [Path(path) for _, path, is_folder in list_entries(root) if is_folder]
    if (
        len(subfolders) == 1
        and subfolders[0].name.lower() not in (*TRAIN_FOLDER_NAMES, *VAL_FOLDER_NAMES)
        and has_subfolders(subfolders[0])
        and (need_classes or not has_images(root))
    ):
        root = subfolders[0]  # unpacking an archive often adds one level
    train, val, notes = find_train_and_val_folders(root)
    folders = [folder for folder in (train, val) if folder]
    if not need_classes and any(has_images(folder) for folder in folders):
        return read_without_classes(train, val, notes)
    scans = [scan_class_folders(folder) for folder in folders]
    if not need_classes and set(scans[-1].classes) - set(scans[0].classes):
        return read_without_classes(train, val, notes)
    notes += [note for scan in scans for note in scan.make_notes()]
    classes = scans[0].classes
    if len(scans) == 2:
        notes += compare_train_and_val_classes(*scans)
    datasets = [scan.to_dataset(classes, real) for scan in scans]
    return datasets[0] if train else None, datasets[-1] if val else None, notes


def find_train_and_val_folders(root: Path) -> tuple[Path | None, Path | None, list[str]]:
    """The training folder, the validation folder and notes; a folder of class folders is for training."""
    folders = {name.lower(): Path(path) for name, path, is_folder in list_entries(root) if is_folder}
    train, *_ = *(folders[name] for name in TRAIN_FOLDER_NAMES if name in folders), None
    validation = [name for name in VAL_FOLDER_NAMES if name in folders]
    splits = [folders[name] for name in (*TRAIN_FOLDER_NAMES, *VAL_FOLDER_NAMES) if name in folders]
    # a class may be named train too, but then it has no subfolders
    if not splits or not (any(has_subfolders(folder) for folder in splits) or len(splits) == len(folders)):
        return root, None, []
    labeled = [
        name for name in validation if has_subfolders(folders[name]) or not train or name not in UNLABELED_FOLDER_NAMES
    ]
    val = folders[labeled[0]] if labeled else None
    unused = sorted(folder.name for folder in folders.values() if folder not in (train, val))
    return train, val, [f"{root}: {quote_names(unused)} not used"] if unused else []


def read_without_classes(
    train: Path | None, val: Path | None, notes: list[str]
) -> tuple[FileDataset | None, FileDataset | None, list[str]]:
    """All images in these folders and below, without classes."""
    datasets = dict[Path, FileDataset]()
    for folder in (train, val):
        if folder is not None:
            files = [file.removeprefix("/") for file in walk_files(str(folder), "", ())]
            images = [file for file in files if is_image_name(file)]
            if not images:
                raise DataError(f"{folder} has no images; expected at least one ({', '.join(IMAGE_SUFFIXES)})")
            datasets[folder] = FileDataset(images, None, (), root=folder)
            if any("/" in file for file in images):
                notes = [*notes, f"{folder}: {format_count(len(images), 'image')} used without classes"]
            notes = [*notes, *note_other_files(folder, [file for file in files if not is_image_name(file)])]
    return train and datasets[train], val and datasets[val], notes


def has_images(folder: Path) -> bool:
    return any(is_image_name(name) and not is_folder for name, _, is_folder in list_entries(folder))


def has_subfolders(folder: Path) -> bool:
    return any(is_folder for _, _, is_folder in list_entries(folder))


def scan_class_folders(root: Path) -> ClassFolderScan:
    """Find all images by class, in folders of any depth."""
    scan = ClassFolderScan(root)
    parents = (str(root.resolve()),)
    for name, path, is_folder in list_entries(root):
        if is_folder:
            images = scan.images_by_class.setdefault(normalize("NFC", name), [])
            for file in walk_files(path, name, parents):
                (images if is_image_name(file) else scan.other_files).append(file)
        elif is_image_name(name):
            scan.images_outside += 1
        else:
            scan.other_files.append(name)
    if not scan.classes:
        given = (
            f"{format_count(scan.images_outside, 'image')} but no class folders" if scan.images_outside else "no images"
        )
        raise DataError(f"{root} has {given}; expected {EXPECTED_CLASS_FOLDERS}")
    return scan


def walk_files(
    folder: str, relative: str, parents: tuple[str, ...], links: "SymlinkGuard | None" = None
) -> Iterator[str]:
    """Every file in the folder and below; links to one of the `parents` are not followed."""
    real, links = str(Path(folder).resolve()), links or SymlinkGuard()
    if real in parents:
        return
    for name, path, is_folder in list_entries(folder):
        if is_folder:
            inner_links = links.follow(path)
            if inner_links is not None:
                yield from walk_files(path, f"{relative}/{name}", (*parents, real), inner_links)
        else:
            yield f"{relative}/{name}"


class SymlinkGuard:
    """Follows a link inside a linked folder only once: two links in each of thirty folders make a billion paths."""

    def __init__(self, followed: set[str] | None = None, *, inside_link: bool = False) -> None:
        self.followed = set[str]() if followed is None else followed
        self.inside_link = inside_link  # whether the path to the current folder contains a link

    def follow(self, folder: str) -> "SymlinkGuard | None":
        """The guard to use inside a folder; None if the folder must not be entered again."""
        if not os.path.islink(folder):  # noqa: PTH114  # faster than Path, called for every folder
            return self
        if self.inside_link:
            real = os.path.realpath(folder)
            if real in self.followed:
                return None
            self.followed.add(real)
        return SymlinkGuard(self.followed, inside_link=True)


def list_entries(folder: str | Path) -> list[tuple[str, str, bool]]:
    """Sorted (name, path, is folder) of the entries that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (each.name, each.path, is_folder_entry(each)) for each in entries if not each.name.startswith(".")
            )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {describe_error(error)}; expected a readable folder") from None


def is_folder_entry(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def compare_train_and_val_classes(train: ClassFolderScan, val: ClassFolderScan) -> Iterator[str]:
    """Notes on classes with too few images; a class that exists only in validation is an error."""
    untrained = sorted(set(val.classes) - set(train.classes))
    if untrained:
        expected = f"expected only classes that {train.folder} has images of: move some there, or remove these"
        raise DataError(f"{val.folder} has images of {quote_names(untrained)}; {expected}")
    missing = sorted(set(train.classes) - set(val.classes))
    if missing:
        yield f"{val.folder}: no images of {quote_names(missing)}; they are not validated"
    single = [name for name in train.classes if len(train.images_by_class[name]) == 1]
    if single:
        yield f"{train.folder}: only one image of {quote_names(single)}"


def quote_names(names: Sequence[str], most: int = 5) -> str:
    return abbreviate_list([repr(name) for name in names], most)
