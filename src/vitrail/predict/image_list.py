"""The images that arguments name: files, folders with their subfolders, patterns and standard input, in order.

Every command that takes images lists them here. The list is lazy, since a folder may have millions of images.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from heapq import nsmallest
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError, describe_error
from vitrail.base.text import format_count
from vitrail.checkpoint.model_location import model_as_image_error
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.formats.class_folders import SymlinkGuard, is_folder_entry, is_image_name
from vitrail.data.images.image_items import ImageItem
from vitrail.data.images.preprocessing import Preprocessing

STDIN = "-"
MAX_NAMES_IN_MEMORY = 100_000  # names of one folder in memory: one with a million files is read ten times
URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
WILDCARD_PATTERN = re.compile(r"[*?[]")


@dataclass
class ImageListSummary:
    """How many images there are, and what is wrong with the arguments."""

    images: int = 0
    repeated: int = 0  # named by an earlier argument, too
    problems: list[str] = field(default_factory=list[str])  # one per folder or pattern without images


@dataclass(frozen=True)
class FolderSearch:
    """The images below a folder; for a pattern, those that match its parts or are in a folder that does."""

    argument: str
    root: str
    pattern_parts: tuple[str, ...] | None = None

    def includes_file(self, names: Sequence[str]) -> bool:
        """Whether a file is one of them; `names` are its path relative to the root."""
        if self.pattern_parts is None:
            return is_image_name(names[-1])
        if "." in self.pattern_parts[-1] and matches_pattern(names, self.pattern_parts):
            return True  # a pattern with a suffix takes any file that matches
        return is_image_name(names[-1]) and any(
            matches_pattern(names[: n + 1], self.pattern_parts) for n in range(len(names))
        )

    def walk(self, ordered: bool) -> Iterator[tuple[str, str | None]]:
        """Path and None for each image; path and problem for each folder that cannot be read."""
        yield from self.walk_folder(self.root, (), (), ordered, SymlinkGuard())

    def walk_folder(
        self, folder: str, names: tuple[str, ...], above: tuple[str, ...], ordered: bool, links: SymlinkGuard
    ) -> Iterator[tuple[str, str | None]]:
        real = os.path.realpath(folder)
        if real in above:  # a link to one of its parents
            return
        try:
            for name, holds_more in scan_visible_entries(folder or ".", ordered):
                path, inside = os.path.join(folder, name), (*names, name)  # noqa: PTH118  # a million times
                if holds_more:
                    further = links.follow(path) if may_match_below(inside, self.pattern_parts) else None
                    if further is not None:
                        yield from self.walk_folder(path, inside, (*above, real), ordered, further)
                elif self.includes_file(inside):
                    yield path, None
        except OSError as error:
            if names or self.pattern_parts is None:
                yield folder, f"{folder!r} cannot be read: {describe_error(error)}; expected a readable folder"

    @property
    def nothing_found_message(self) -> str:
        if self.pattern_parts is None:
            if (error := model_as_image_error(self.argument)) is not None:
                return str(error)
            return (
                f"{self.argument!r} has no images; expected some in it or its subfolders (.jpg, .png, .webp and others)"
            )
        return f"{self.argument!r} matches no images; expected a file, a folder or a pattern in quotes"


class ImageList:
    """The images of all arguments, in order, each once; folders are read while iterating, and no image is opened."""

    def __init__(self, arguments: Sequence[str], stdin: BinaryIO | None, max_bytes: int) -> None:
        self.stdin, self.max_bytes, self.stdin_bytes = stdin, max_bytes, None
        self.searches = [parse_image_argument(each) for each in arguments]
        self.files, self.roots = dict[str, int](), dict[str, list[int]]()
        self.last_folder = ("", os.path.realpath(""))  # the last folder that was resolved, and its real path
        for number, place in enumerate(self.searches):
            if isinstance(place, FolderSearch):
                self.roots.setdefault(os.path.realpath(place.root), []).append(number)
            else:
                self.files.setdefault(self.canonical_path(place), number)

    def __iter__(self) -> Iterator[ImageItem]:
        for path, repeated, complaint in self.iterate_paths(ordered=True):
            if complaint is None and not repeated:
                yield ImageItem(self.read_stdin() if path == STDIN else path, path)

    def summarize(self) -> ImageListSummary:
        """Count all images, which takes little time compared with reading them."""
        result = ImageListSummary()
        for _, repeated, complaint in self.iterate_paths(ordered=False):
            if complaint is not None:
                result.problems.append(complaint)
            else:
                result.images += not repeated
                result.repeated += repeated
        return result

    def iterate_paths(self, *, ordered: bool) -> Iterator[tuple[str, bool, str | None]]:
        """Path, whether an earlier argument has it, and for an argument without images the problem."""
        for number, place in enumerate(self.searches):
            if isinstance(place, str):
                yield place, self.is_repeated(place, number), None
                continue
            empty = True
            for path, complaint in place.walk(ordered):
                empty = False
                yield path, complaint is None and self.is_repeated(path, number), complaint
            if empty:
                yield place.argument, False, place.nothing_found_message

    def is_repeated(self, path: str, number: int) -> bool:
        """Whether an earlier argument names this file; no list of all files is kept, since it may be too long."""
        if number == 0:
            return False
        canonical = self.canonical_path(path)
        if self.files.get(canonical, number) < number:
            return True
        inner, names = canonical, list[str]()
        while (outer := os.path.dirname(inner)) != inner:  # noqa: PTH120
            names.insert(0, os.path.basename(inner))  # noqa: PTH119
            for earlier in self.roots.get(outer, ()):
                place = self.searches[earlier]
                if (
                    earlier < number
                    and isinstance(place, FolderSearch)
                    and has_no_hidden_names(names)
                    and place.includes_file(names)
                ):
                    return os.path.lexists(path)  # a missing file is not in the folder, so it is reported here
            inner = outer
        return False

    def canonical_path(self, path: str) -> str:
        """One path per file, however its folder is written."""
        folder, name = os.path.split(path)
        if path == STDIN:
            return path
        if folder != self.last_folder[0]:
            self.last_folder = (folder, os.path.realpath(folder))
        return os.path.join(self.last_folder[1], name)  # noqa: PTH118

    def read_stdin(self) -> bytes:
        """The bytes of standard input, which can be read only once."""
        if self.stdin_bytes is None:
            self.stdin_bytes = b"" if self.stdin is None else self.stdin.read(self.max_bytes + 1)
        return self.stdin_bytes


def list_images(arguments: Sequence[str], *, stdin: BinaryIO | None = None, max_bytes: int = 2**28) -> ImageList:
    """The images that the arguments name: files, folders with all their subfolders, patterns, `-` for `stdin`."""
    if not arguments:
        raise ConfigError("no images; expected at least one file, folder, pattern in quotes, or - for standard input")
    for each in arguments:
        if URL_PATTERN.match(each) and not os.path.lexists(each):
            raise ConfigError(f"{each!r} is a URL, and URLs are not fetched; download it first")
        if not each or "\0" in each:
            raise ConfigError(f"{each!r} is not a path; expected a file, a folder, a pattern in quotes, or -")
        # a folder with a model in it may have images, too
        if not os.path.isdir(each) and (error := model_as_image_error(each)) is not None:  # noqa: PTH112
            raise error
    if STDIN in arguments and stdin is not None and stdin.isatty():
        raise ConfigError("- reads an image from standard input, which is a terminal; expected a pipe: - < photo.jpg")
    return ImageList(arguments, stdin, max_bytes)


def collect_images(arguments: Sequence[str], stdin: BinaryIO | None = None) -> tuple[list[ImageItem], list[str]]:
    """A list of all images, and the problems with other arguments; DataError if no image is found."""
    listing = list_images(arguments, stdin=stdin)
    summary = listing.summarize()
    check_has_images(summary)
    return list(listing), summary.problems


def decode_images(
    arguments: Sequence[str], preprocessing: Preprocessing, on_error: Callable[[DataError], object]
) -> NDArray[np.uint8]:
    """The images to `check` an export on, as input of the model; unreadable ones are passed to `on_error`.

    (B, rows, columns, C)
    """
    images, problems = collect_images(arguments)
    found, errors = list[NDArray[np.uint8]](), [DataError(each) for each in problems]
    for each in images:
        try:
            found.append(decode_for_model(each.source, preprocessing))
        except DataError as error:
            errors.append(error)
    if not found:
        raise DataError(f"`check` has no image that can be read: {errors[0]}")
    for error in errors:
        on_error(error)
    return np.stack(found)


def check_has_images(summary: ImageListSummary) -> None:
    if not summary.images:
        first, *others = summary.problems
        raise DataError(f"{first}{f'; {len(others)} more have none either' if others else ''}")


def unreadable_images_error(
    failed: int, total: int, problems: Sequence[str] = (), where: object | None = None
) -> DataError | None:
    """The error at the end of a job that skipped some of its images; `where` has the results of the others."""
    counts = [f"{failed} of {format_count(total, 'image')}"] * bool(failed)
    counts += [f"{len(problems)} of the arguments"] * bool(problems)
    others = "" if where is None or failed == total else f"; the results of the others are in {where}"
    return DataError(f"{' and '.join(counts)} could not be read{others}") if counts else None


@dataclass(frozen=True)
class ArgumentImages:
    """The images that arguments name. One that cannot be read is skipped; if it is the only one, it is an error."""

    images: list[ImageItem]
    problems: list[str]  # with other arguments
    on_error: Callable[[DataError], object]
    failed: list[DataError] = field(default_factory=list[DataError])

    @property
    def bar_length(self) -> int:
        """Of a progress bar; a single image has none."""
        return len(self.images) if len(self.images) > 1 else 0

    def skip(self, error: DataError) -> None:
        if len(self.images) == 1 and not self.problems:
            raise error
        self.failed.append(error)
        self.on_error(error)

    def make_error(self, where: object | None) -> DataError | None:
        """What to raise in the end, if something could not be read; `where` has the results of the others."""
        return unreadable_images_error(len(self.failed), len(self.images), self.problems, where)


def open_arguments(
    arguments: Sequence[str], stdin: BinaryIO | None, on_error: Callable[[DataError], object]
) -> ArgumentImages:
    """List the images of files, folders and patterns, and `-` for `stdin`; problems are passed to `on_error`."""
    images, problems = collect_images(arguments, stdin)
    for problem in problems:
        on_error(DataError(problem))
    named = [replace(each, name="stdin") if each.name == STDIN else each for each in images]
    return ArgumentImages(named, problems, on_error)


def parse_image_argument(argument: str) -> FolderSearch | str:
    if argument == STDIN:
        return STDIN
    if os.path.isdir(argument):  # noqa: PTH112  # Path.is_dir raises if a name is too long
        return FolderSearch(argument, argument)
    parts = re.sub(r"/+", "/", argument).split("/")
    wild = next((n for n, part in enumerate(parts) if WILDCARD_PATTERN.search(part)), None)
    if wild is None or os.path.lexists(argument):
        return argument
    root = "/".join(parts[:wild]) or ("/" if wild else "")
    return FolderSearch(argument, root, tuple(part for part in parts[wild:] if part))


def scan_visible_entries(folder: str, ordered: bool) -> Iterator[tuple[str, bool]]:
    """Name and whether it is a folder, for each entry that is not hidden; MAX_NAMES_IN_MEMORY at a time."""
    last = ""
    while True:
        with os.scandir(folder) as found:
            shown = (
                (each.name, is_folder_entry(each))
                for each in found
                if each.name > last and is_visible_file_or_folder(each)
            )
            if not ordered:
                yield from shown
                return
            part = nsmallest(MAX_NAMES_IN_MEMORY, shown)
        yield from part
        if len(part) < MAX_NAMES_IN_MEMORY:
            return
        last = part[-1][0]


def is_visible_file_or_folder(entry: os.DirEntry[str]) -> bool:
    """Neither hidden nor a pipe, which would block; a broken link is listed, and reported when it is opened."""
    return not entry.name.startswith(".") and (entry.is_symlink() or entry.is_dir() or entry.is_file())


def matches_pattern(names: Sequence[str], pattern_parts: Sequence[str]) -> bool:
    """Match part by part as a shell does; ** is any number of folders."""
    if not pattern_parts or not names:
        return not names and all(part == "**" for part in pattern_parts)
    if pattern_parts[0] == "**":
        return matches_pattern(names, pattern_parts[1:]) or matches_pattern(names[1:], pattern_parts)
    return fnmatchcase(names[0], pattern_parts[0]) and matches_pattern(names[1:], pattern_parts[1:])


def may_match_below(names: Sequence[str], pattern_parts: Sequence[str] | None) -> bool:
    """Whether the folder, or something below it, may match; None matches everything."""
    if not names or not pattern_parts:
        return True
    return pattern_parts[0] == "**" or (
        fnmatchcase(names[0], pattern_parts[0]) and may_match_below(names[1:], pattern_parts[1:])
    )


def has_no_hidden_names(names: Sequence[str]) -> bool:
    return not any(name.startswith(".") for name in names)
