"""The pictures of a job: files, folders, patterns and standard input; in order, one by one, however many there are."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from heapq import nsmallest
from typing import BinaryIO

from vitrail.data.folders import Links, is_folder, is_picture
from vitrail.data.shown import Shown
from vitrail.errors import ConfigError, one_line

STDIN = "-"
AT_ONCE = 100_000  # names of one folder that are held: one with a million is read ten times over
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
WILD = re.compile(r"[*?[]")


@dataclass
class Survey:
    """What a job is about to do."""

    pictures: int = 0
    repeated: int = 0  # given before, so not done again
    complaints: list[str] = field(default_factory=list[str])  # one a folder or pattern that gives nothing


@dataclass(frozen=True)
class Below:
    """The pictures below a folder; of a pattern, those that match its `parts` or lie in a folder that does."""

    given: str
    root: str
    parts: tuple[str, ...] | None = None

    def takes(self, names: Sequence[str]) -> bool:
        """Whether the file that so many folders down has these names is one of them."""
        if self.parts is None:
            return is_picture(names[-1])
        if "." in self.parts[-1] and matches(names, self.parts):
            return True  # who spells the ending means it
        return is_picture(names[-1]) and any(matches(names[: n + 1], self.parts) for n in range(len(names)))

    def leads(self, names: Sequence[str]) -> bool:
        """Whether there may be some below this folder."""
        return self.parts is None or leads(names, self.parts)

    def walk(self, ordered: bool) -> Iterator[tuple[str, str | None]]:
        """Path and None of each picture; path and what is wrong of each folder that cannot be read."""
        yield from self.below(self.root, (), (), ordered, Links())

    def below(
        self, folder: str, names: tuple[str, ...], above: tuple[str, ...], ordered: bool, links: Links
    ) -> Iterator[tuple[str, str | None]]:
        real = os.path.realpath(folder)
        if real in above:  # a link that leads back to where it lies
            return
        try:
            for name, holds_more in visible(folder or ".", ordered):
                path, inside = os.path.join(folder, name), (*names, name)  # noqa: PTH118  # a million times
                if holds_more:
                    further = links.follow(path) if self.leads(inside) else None
                    if further is not None:
                        yield from self.below(path, inside, (*above, real), ordered, further)
                elif self.takes(inside):
                    yield path, None
        except OSError as error:
            if names or self.parts is None:
                yield folder, f"{folder!r} cannot be read: {one_line(error)}; expected a folder that may be read"

    @property
    def nothing(self) -> str:
        if self.parts is None:
            return f"{self.given!r} holds no pictures; expected some in it or below (.jpg, .png, .webp and others)"
        return f"{self.given!r} matches nothing; expected pictures there: a folder, or a pattern in quotes"


class Listing:
    """All that was given, in order; nothing is opened, and a folder is read as its pictures are asked for."""

    def __init__(self, arguments: Sequence[str], stdin: BinaryIO | None, most_bytes: int) -> None:
        self.stdin, self.most_bytes, self.piped = stdin, most_bytes, None
        self.places = [place_of(each) for each in arguments]
        self.files, self.roots = dict[str, int](), dict[str, list[int]]()
        self.folder = ("", os.path.realpath(""))  # the last one asked about, and its one true name
        for number, place in enumerate(self.places):
            if isinstance(place, Below):
                self.roots.setdefault(os.path.realpath(place.root), []).append(number)
            else:
                self.files.setdefault(self.identity(place), number)

    def __iter__(self) -> Iterator[Shown]:
        for path, repeated, complaint in self.found(ordered=True):
            if complaint is None and not repeated:
                yield Shown(self.piped_bytes() if path == STDIN else path, path)

    def survey(self) -> Survey:
        """Counts them all, which is quick beside anything that is done with them."""
        result = Survey()
        for _, repeated, complaint in self.found(ordered=False):
            if complaint is not None:
                result.complaints.append(complaint)
            else:
                result.pictures += not repeated
                result.repeated += repeated
        return result

    def found(self, *, ordered: bool) -> Iterator[tuple[str, bool, str | None]]:
        """Path, whether it was given before, and what is wrong with it where it is no picture at all."""
        for number, place in enumerate(self.places):
            if isinstance(place, str):
                yield place, self.is_repeated(place, number), None
                continue
            empty = True
            for path, complaint in place.walk(ordered):
                empty = False
                yield path, complaint is None and self.is_repeated(path, number), complaint
            if empty:
                yield place.given, False, place.nothing

    def is_repeated(self, path: str, number: int) -> bool:
        """Whether an earlier argument has this file: found by what they say, since a list of all may be too long."""
        if number == 0:
            return False
        whole = self.identity(path)
        if self.files.get(whole, number) < number:
            return True
        inner, names = whole, list[str]()
        while (outer := os.path.dirname(inner)) != inner:  # noqa: PTH120
            names.insert(0, os.path.basename(inner))  # noqa: PTH119
            for earlier in self.roots.get(outer, ()):
                place = self.places[earlier]
                if earlier < number and isinstance(place, Below) and is_plain(names) and place.takes(names):
                    return os.path.lexists(path)  # of what does not exist a folder has told nothing
            inner = outer
        return False

    def identity(self, path: str) -> str:
        """One name for one file, however its folder was spelt."""
        folder, name = os.path.split(path)
        if path == STDIN:
            return path
        if folder != self.folder[0]:
            self.folder = (folder, os.path.realpath(folder))
        return os.path.join(self.folder[1], name)  # noqa: PTH118

    def piped_bytes(self) -> bytes:
        """What stands on standard input; it can be read only once."""
        if self.piped is None:
            self.piped = b"" if self.stdin is None else self.stdin.read(self.most_bytes + 1)
        return self.piped


def pictures_of(arguments: Sequence[str], *, stdin: BinaryIO | None = None, most_bytes: int = 2**28) -> Listing:
    """The pictures that these words mean: files, folders with all below them, patterns, `-` for standard input."""
    if not arguments:
        raise ConfigError("no pictures; expected at least one: a file, a folder, a pattern in quotes, or - for stdin")
    for each in arguments:
        if URL.match(each) and not os.path.lexists(each):
            raise ConfigError(f"{each!r} is a URL, and URLs are not fetched; expected a file: download it first")
        if not each or "\0" in each:
            raise ConfigError(f"{each!r} names nothing; expected a file, a folder, a pattern in quotes, or -")
    if STDIN in arguments and stdin is not None and stdin.isatty():
        raise ConfigError("- with nothing piped in; expected a picture's bytes: vitrail predict MODEL - < photo.jpg")
    return Listing(arguments, stdin, most_bytes)


def place_of(argument: str) -> Below | str:
    if argument == STDIN:
        return STDIN
    if os.path.isdir(argument):  # noqa: PTH112  # of a name that is too long Path.is_dir is an error
        return Below(argument, argument)
    parts = re.sub(r"/+", "/", argument).split("/")
    wild = next((n for n, part in enumerate(parts) if WILD.search(part)), None)
    if wild is None or os.path.lexists(argument):
        return argument
    root = "/".join(parts[:wild]) or ("/" if wild else "")
    return Below(argument, root, tuple(part for part in parts[wild:] if part))


def visible(folder: str, ordered: bool) -> Iterator[tuple[str, bool]]:
    """Name and whether it is a folder, of all that is not hidden; no more than AT_ONCE of them are held."""
    last = ""
    while True:
        with os.scandir(folder) as found:
            shown = ((each.name, is_folder(each)) for each in found if each.name > last and is_candidate(each))
            if not ordered:
                yield from shown
                return
            part = nsmallest(AT_ONCE, shown)
        yield from part
        if len(part) < AT_ONCE:
            return
        last = part[-1][0]


def is_candidate(entry: os.DirEntry[str]) -> bool:
    """Neither hidden nor a pipe, which would be waited for; a link that leads nowhere is to be told of."""
    return not entry.name.startswith(".") and (entry.is_symlink() or entry.is_dir() or entry.is_file())


def matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Part by part as a shell does it; ** is any number of folders."""
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return matches(names, parts[1:]) or matches(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and matches(names[1:], parts[1:])


def leads(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether what lies below a folder of these names may match, or the folder itself does."""
    if not names or not parts:
        return True
    return parts[0] == "**" or (fnmatchcase(names[0], parts[0]) and leads(names[1:], parts[1:]))


def is_plain(names: Sequence[str]) -> bool:
    return not any(name.startswith(".") for name in names)
