"""Open images with captions by name, folder or file: training, validation and test images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.base.errors import DataError
from vitrail.base.text import escape_unprintable, format_count
from vitrail.data.captions.caption_files import (
    EXPECTED_CAPTIONS,
    CaptionFiles,
    find_caption_files,
    find_image_folder,
    list_images_without_captions,
    read_captions,
    read_list,
)
from vitrail.data.captions.collages import CollageImages
from vitrail.data.images.array_dataset import NO_LABEL
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.formats.class_folders import FileDataset, join_names
from vitrail.data.images.validation_split import check_val_share, choose_validation_mask

COLLAGES = "collages"  # generated, so that they need no files
MAX_MISSING_SHARE = 0.01  # of the images; one of Flickr8k's 8,092 names has no file


@dataclass(frozen=True)
class CaptionedImages:
    """Images, and one caption or several of each."""

    images: ImageDataset
    captions: tuple[tuple[str, ...], ...]  # of each image
    name: str

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def caption_count(self) -> int:
        return sum(map(len, self.captions))


@dataclass(frozen=True, kw_only=True)
class CaptionSplits:
    """Training, validation and test images with captions, and notes for the user."""

    name: str
    train: CaptionedImages
    val: CaptionedImages | None  # None if nothing is held out
    test: CaptionedImages | None = None
    notes: tuple[str, ...] = ()


def open_captions(data: str | Path | CaptionSplits, *, seed: int = 0, val_share: float = 0.2) -> CaptionSplits:
    """Open images with captions: a folder, a table of files and captions, or "collages", which are generated.

    A folder has captions.tsv, lines of a file, a tab and a caption, and the images next to it or in a folder; an image
    may have several captions. The files of Flickr8k are read too, with its lists of training, validation and test
    images. Without such lists, and without train.tsv and val.tsv, `val_share` of the images is held out by the seed.

    >>> data = open_captions("collages")
    >>> len(data.train), data.train.captions[0]
    """
    if isinstance(data, CaptionSplits):
        return data
    check_val_share(val_share)
    if data == COLLAGES:
        train, val, test = (open_collages(CollageImages(part)) for part in ("train", "val", "test"))
        return CaptionSplits(name=COLLAGES, train=train, val=val, test=test)
    try:
        where = Path(data).expanduser()
        files = find_caption_files(where)
    except (OSError, ValueError, RuntimeError):  # a NUL in the name, a circular link, no home folder
        raise DataError(f"{str(data)!r} cannot be opened; {EXPECTED_CAPTIONS}") from None
    notes = list[str]()
    captions = {part: read_table(path, notes) for part, path in files.tables.items()}
    every = list(dict.fromkeys(name for part in captions.values() for name in part))
    folder = find_image_folder(every, files)
    missing = find_missing_images(folder, every)
    if missing:
        notes.append(f"{format_count(len(missing), 'image')} with captions missing in {folder}: {join_names(missing)}")
    if others := list_images_without_captions(folder, set(every)):
        notes.append(f"{format_count(len(others), 'image')} without a caption not used: {join_names(others)}")
    for name in missing:
        for part in captions.values():
            part.pop(name, None)
    parts = split_captions(captions, files, notes, seed=seed, val_share=val_share)
    train, val, test = (select_images(folder, parts.get(part, {}), part) for part in ("train", "val", "test"))
    if train is None:
        raise DataError(f"{where} has no images to train on; {EXPECTED_CAPTIONS}")
    name = (where if where.is_dir() else where.parent).resolve().name
    return CaptionSplits(name=name, train=train, val=val, test=test, notes=tuple(map(escape_unprintable, notes)))


def open_collages(images: CollageImages) -> CaptionedImages:
    return CaptionedImages(images, tuple((each,) for each in images.list_sentences()), f"{COLLAGES} ({images.part})")


def read_table(path: Path, notes: list[str]) -> dict[str, list[str]]:
    captions, found = read_captions(path)
    without = [name for name, each in captions.items() if not each]
    notes += found
    if without:
        notes.append(f"{path.name}: {format_count(len(without), 'image')} without a caption: {join_names(without)}")
    return {name: each for name, each in captions.items() if each}


def find_missing_images(folder: Path, names: Sequence[str]) -> list[str]:
    """Images that are not in the folder; an error if there are many."""
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) > MAX_MISSING_SHARE * len(names):
        raise DataError(
            f"{len(missing)} of {format_count(len(names), 'image')} with captions are missing in {folder}: "
            f"{join_names(missing)}; add these images, or remove their captions"
        )
    return missing


def split_captions(
    captions: Mapping[str, Mapping[str, list[str]]],
    files: CaptionFiles,
    notes: list[str],
    *,
    seed: int,
    val_share: float,
) -> dict[str, Mapping[str, list[str]]]:
    """The captions of each part, by image: of its table, of its list, or with some images held out for validation."""
    parts = take_listed_images(captions["train"], files.lists, notes) if files.lists else dict(captions)
    check_parts_are_disjoint(parts)
    if "val" in parts or "train" not in parts:
        return parts
    train = parts["train"]
    labels = np.full(len(train), NO_LABEL, np.int64)
    held_out = choose_validation_mask([*train], labels, seed=seed, share=val_share)
    for part, is_held_out in (("val", True), ("train", False)):
        parts[part] = {name: train[name] for name, held in zip(train, held_out, strict=True) if held == is_held_out}
    if held_out.any():
        notes.append(f"{held_out.sum()} of {len(train)} images held out for validation, by seed {seed}")
    return parts


def take_listed_images(
    captions: Mapping[str, list[str]], lists: Mapping[str, Path], notes: list[str]
) -> dict[str, Mapping[str, list[str]]]:
    """The captions of the images in each list."""
    parts = dict[str, Mapping[str, list[str]]]()
    for part, path in lists.items():
        names = read_list(path)
        if without := [name for name in names if name not in captions]:
            notes.append(f"{path.name}: {format_count(len(without), 'image')} without a caption: {join_names(without)}")
        parts[part] = {name: captions[name] for name in names if name in captions}
    if unlisted := len(captions.keys() - {name for part in parts.values() for name in part}):
        notes.append(f"{format_count(unlisted, 'image')} in none of the lists not used")
    return parts


def check_parts_are_disjoint(parts: Mapping[str, Mapping[str, list[str]]]) -> None:
    owners = dict[str, str]()
    for part, captions in parts.items():
        if twice := [name for name in captions if owners.setdefault(name, part) != part]:
            raise DataError(
                f"{format_count(len(twice), 'image')} of {owners[twice[0]]} also in {part}: {join_names(twice)}; "
                "expected each image in one part"
            )


def select_images(folder: Path, captions: Mapping[str, list[str]], part: str) -> CaptionedImages | None:
    if not captions:
        return None
    images = FileDataset([*captions], None, (), root=folder)
    return CaptionedImages(images, tuple(map(tuple, captions.values())), f"{folder.name} ({part})")
