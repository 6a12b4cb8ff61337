"""Open images with captions by name, folder or file: training, validation and test images, and captions as tokens."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.base.errors import DataError
from vitrail.base.files import suggest_sibling
from vitrail.base.text import escape_unprintable, format_count
from vitrail.data.batch import Batch
from vitrail.data.captions.collages import CollageImages
from vitrail.data.images.array_dataset import NO_LABEL
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.formats.class_folders import FileDataset, is_image_name, list_entries, quote_names
from vitrail.data.images.image_items import evenly_spaced_indices
from vitrail.data.text.batches import TokenRows
from vitrail.data.text.text_files import read_text_lines
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.data.validation_split import check_val_share, choose_validation_mask

TABLE_NAMES = ("captions.tsv", "captions.tsv.gz", "captions.txt", "Flickr8k.token.txt", "results_20130124.token")
PART_TABLES = {"train": ("train",), "val": ("val", "valid", "dev"), "test": ("test",)}  # NAME.tsv or NAME.tsv.gz
PART_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
FILE_HEADERS, CAPTION_HEADERS = ("file", "image", "file_name", "image_name"), ("caption", "text", "sentence")
EXPECTED_CAPTIONS = (
    "expected 'collages', or a folder of images with captions.tsv (lines of FILE, a tab and CAPTION), with train.tsv, "
    "val.tsv and test.tsv, or with the files of Flickr8k (Flickr8k.token.txt, or captions.txt)"
)
NUMBERED_NAME = re.compile(r"(.+)#[0-9]+")  # name.jpg#0: the first caption of an image
IMAGES_TO_TRY = 100  # of which a folder must have some, to be the one that a table names
COLLAGES = "collages"  # generated, so that they need no files
MAX_MISSING_SHARE = 0.01  # of the images; one of Flickr8k's 8,092 names has no file


@dataclass(frozen=True)
class CaptionFiles:
    """Where the captions are: one table, perhaps with lists of the images of each part, or a table for each part."""

    tables: Mapping[str, Path]  # by part; {"train": …} alone if there is only one
    lists: Mapping[str, Path]  # by part; empty if the parts are not listed
    root: Path  # the folder to look for images in


def find_caption_files(where: Path) -> CaptionFiles:
    """The tables of a folder, which may be one folder further down, or a table itself."""
    if where.is_file():
        return CaptionFiles({"train": where}, find_lists(where.parent), where.parent)
    if not where.is_dir():
        raise DataError(f"{str(where)!r} does not exist; {EXPECTED_CAPTIONS}{suggest_sibling(where)}")
    for folder in list_folders(where):
        for name in TABLE_NAMES:
            if (folder / name).is_file():
                return CaptionFiles({"train": folder / name}, find_lists(folder), where)
        if "train" in (parts := find_part_tables(folder)):
            return CaptionFiles(parts, {}, where)
    raise DataError(f"{where} has no captions; {EXPECTED_CAPTIONS}")


def has_caption_table(data: str) -> bool:
    """Whether a folder has captions by the names of its files; train.tsv may as well have sentence pairs."""
    try:
        root = Path(data).expanduser()
        return root.is_dir() and any((folder / name).is_file() for folder in list_folders(root) for name in TABLE_NAMES)
    except (OSError, ValueError, RuntimeError, DataError):
        return False


def list_folders(root: Path) -> list[Path]:
    """The folder and those in it."""
    return [root, *(Path(path) for _, path, is_folder in list_entries(root) if is_folder)]


def find_lists(folder: Path) -> dict[str, Path]:
    return {part: folder / name for part, name in PART_LISTS.items() if (folder / name).is_file()}


def find_part_tables(folder: Path) -> dict[str, Path]:
    found = dict[str, Path]()
    for part, names in PART_TABLES.items():
        candidates = [folder / f"{name}{suffix}" for name in names for suffix in (".tsv", ".tsv.gz")]
        if existing := [path for path in candidates if path.is_file()]:
            found[part] = existing[0]
    return found


def read_captions(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The captions of each image by its name, in the order of the file, and notes. Empty captions are left out."""
    lines = [(number, line) for number, line in enumerate(read_text_lines(path), 1) if line.strip()]
    separator = "," if lines and is_header(lines[0][1], ",") else "\t"
    if lines and is_header(lines[0][1], separator):
        lines = lines[1:]
    rows = [split_row(line, separator, f"line {number} of {path}") for number, line in lines]
    numbered = [NUMBERED_NAME.fullmatch(name) for name, _ in rows]
    if all(numbered):
        rows = [(match[1], caption) for match, (_, caption) in zip(numbered, rows, strict=True) if match]
    captions = dict[str, list[str]]()
    for name, caption in rows:
        captions.setdefault(name, []).extend([caption] if caption else [])
    empty = sum(not caption for _, caption in rows)
    if empty == len(rows):
        given = f"{format_count(empty, 'line')} without a caption" if rows else "no captions"
        raise DataError(f"{path} has {given}; expected at least one caption: FILE, a tab and CAPTION")
    return captions, [f"{path.name}: {format_count(empty, 'empty caption')} left out"] if empty else []


def is_header(line: str, separator: str) -> bool:
    name, _, caption = line.lower().partition(separator)
    return name.strip() in FILE_HEADERS and caption.strip() in CAPTION_HEADERS


def split_row(line: str, separator: str, where: str) -> tuple[str, str]:
    """The name of the image and the caption, in which every run of white space is one space."""
    name, found, caption = line.partition(separator)
    name = name.strip()
    if not found or not name or (separator == "\t" and "\t" in caption.strip()):
        expected = "a file, a tab and a caption" if separator == "\t" else "a file, a comma and a caption"
        raise DataError(f"{where} is {line[:60]!r}; expected {expected}")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"{where} names {name[:60]!r}; expected a file in the folder of the images")
    caption = " ".join(caption.split())
    if separator == "," and len(caption) > 1 and caption[0] == caption[-1] == '"':
        caption = " ".join(caption[1:-1].replace('""', '"').split())  # quoted, since it has commas
    return name, caption


def read_list(path: Path) -> list[str]:
    """The names of images in a file, one per line."""
    names = [line.strip() for line in read_text_lines(path)]
    return [name for name in dict.fromkeys(names) if name]


def find_image_folder(names: Sequence[str], files: CaptionFiles) -> Path:
    """The folder that has the most of some of these images: that of the table, the root, or a folder in the root."""
    folders = [next(iter(files.tables.values())).parent, *list_folders(files.root)]
    some = [names[index] for index in evenly_spaced_indices(len(names), IMAGES_TO_TRY)]
    counts = [sum((folder / name).is_file() for name in some) for folder in folders]
    if not max(counts):
        raise DataError(
            f"none of the {format_count(len(names), 'image')} in {next(iter(files.tables.values()))} is in "
            f"{files.root} or a folder in it, for example {names[0]!r}; expected the images next to the captions"
        )
    return folders[counts.index(max(counts))]


def list_images_without_captions(folder: Path, named: Collection[str]) -> list[str]:
    """Images of a folder, not those of folders in it, that no caption is for."""
    entries = [name for name, _, is_folder in list_entries(folder) if not is_folder]
    return [name for name in entries if is_image_name(name) and name not in named]


@dataclass(frozen=True)
class CaptionedImages:
    """Images, and one caption or several of each."""

    images: ImageDataset
    captions: tuple[tuple[str, ...], ...]  # of each image
    name: str

    def __len__(self) -> int:
        return len(self.captions)


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
        notes.append(f"{format_count(len(missing), 'image')} with captions missing in {folder}: {quote_names(missing)}")
    if others := list_images_without_captions(folder, set(every)):
        notes.append(f"{format_count(len(others), 'image')} without a caption not used: {quote_names(others)}")
    for name in missing:
        for part in captions.values():
            part.pop(name, None)
    parts = split_captions(captions, files, notes, seed=seed, val_share=val_share)
    train, val, test = (open_image_files(folder, parts.get(part, {}), part) for part in ("train", "val", "test"))
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
        notes.append(f"{path.name}: {format_count(len(without), 'image')} without a caption: {quote_names(without)}")
    return {name: each for name, each in captions.items() if each}


def find_missing_images(folder: Path, names: Sequence[str]) -> list[str]:
    """Images that are not in the folder; an error if there are many."""
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) > MAX_MISSING_SHARE * len(names):
        raise DataError(
            f"{len(missing)} of {format_count(len(names), 'image')} with captions are missing in {folder}: "
            f"{quote_names(missing)}; add these images, or remove their captions"
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
            notes.append(
                f"{path.name}: {format_count(len(without), 'image')} without a caption: {quote_names(without)}"
            )
        parts[part] = {name: captions[name] for name in names if name in captions}
    if unlisted := len(captions.keys() - {name for part in parts.values() for name in part}):
        notes.append(f"{format_count(unlisted, 'image')} in none of the lists not used")
    return parts


def check_parts_are_disjoint(parts: Mapping[str, Mapping[str, list[str]]]) -> None:
    owners = dict[str, str]()
    for part, captions in parts.items():
        if twice := [name for name in captions if owners.setdefault(name, part) != part]:
            count = f"{format_count(len(twice), 'image')} of {owners[twice[0]]} {'is' if len(twice) == 1 else 'are'}"
            raise DataError(f"{count} also in {part}: {quote_names(twice)}; expected each image in one part")


def open_image_files(folder: Path, captions: Mapping[str, list[str]], part: str) -> CaptionedImages | None:
    if not captions:
        return None
    images = FileDataset([*captions], None, (), root=folder)
    return CaptionedImages(images, tuple(map(tuple, captions.values())), f"{folder.name} ({part})")


@dataclass(frozen=True, kw_only=True)
class EncodedCaptions:
    """Captions as tokens, without those that are too long for the model, and the image of each."""

    rows: TokenRows
    owners: NDArray[np.int64]  # the image of each caption
    pad: int
    start: int
    end: int
    notes: tuple[str, ...] = ()

    @classmethod
    def encode(cls, data: CaptionedImages, tokenizer: TextTokenizer, *, length: int | None = None) -> "EncodedCaptions":
        """Encode all captions; those with more than `length` tokens, with the end token, are left out."""
        every = tokenizer.encode([caption for captions in data.captions for caption in captions])
        owners = np.repeat(np.arange(len(data)), [len(captions) for captions in data.captions])
        lengths = np.fromiter(map(len, every), np.int64, len(every)) + 1
        kept = np.flatnonzero(lengths <= length) if length is not None else np.arange(len(every))
        if len(every) and not len(kept):
            raise DataError(
                f"{data.name}: all {len(every):,} captions are longer than {length} tokens; expected a larger "
                "`max_length`"
            )
        dropped = len(every) - len(kept)
        return cls(
            rows=TokenRows.join([every[each] for each in kept]),
            owners=owners[kept],
            pad=tokenizer.pad,
            start=tokenizer.start,
            end=tokenizer.end,
            notes=(f"{data.name}: {format_count(dropped, 'caption')} longer than {length} tokens left out",)
            if dropped
            else (),
        )

    def __len__(self) -> int:
        return len(self.owners)

    def count_tokens(self, examples: NDArray[np.int64]) -> int:
        return int((self.rows.lengths[examples] + 1).sum())

    def add_words(self, batch: Batch, tokens_per_part: float | None = None) -> Batch:
        """The batch with `target_in` and `target_out` (B, M), and its `share` ().

        The caption that the model reads is one token behind the one it predicts. The share is the number of tokens of
        this batch relative to the mean of all parts of a step, so that the mean of share × (mean loss of a part's
        tokens) is the mean loss of all tokens; 1 if that is not known.
        """
        examples = batch["indices"].numpy()
        share = 1.0 if tokens_per_part is None else self.count_tokens(examples) / tokens_per_part
        words = {
            "target_in": self.rows.pad(examples, pad=self.pad, first=self.start),
            "target_out": self.rows.pad(examples, pad=self.pad, last=self.end),
            "share": torch.tensor(share, dtype=torch.float32),
        }
        return replace(batch, tensors={**batch.tensors, **words})
