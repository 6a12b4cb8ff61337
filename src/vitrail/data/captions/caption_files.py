"""Files of captions: a table of two columns, Flickr8k's token file, the captions.txt of its copies, lists of images.

All are untrusted text in UTF-8 and are read within limits.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vitrail.base.errors import DataError
from vitrail.base.files import suggest_sibling
from vitrail.base.text import format_count
from vitrail.data.images.formats.class_folders import is_image_name, list_entries
from vitrail.data.images.image_items import evenly_spaced_indices
from vitrail.data.text.text_files import read_text_lines

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
