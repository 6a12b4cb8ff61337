"""Which pictures are meant, and in which order."""

import os
import tracemalloc
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest

from vitrail.errors import ConfigError
from vitrail.predict import image_list
from vitrail.predict.image_list import (
    ImageListSummary,
    list_images,
    matches_pattern,
    may_match_below,
    scan_visible_entries,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def names(*arguments: str) -> list[str]:
    """As found, and as counted."""
    listing = list_images(arguments)
    found = [each.name for each in listing]
    assert listing.summarize().images == len(found)
    return found


def test_a_folder_gives_all_below_in_order(here: Path) -> None:
    touch("f/b/2.jpg", "f/b/10.PNG", "f/a.webp", "f/c.txt", "f/b/.hidden.jpg", "f/.git/x.jpg", "f/d/e/z.tiff")
    assert names("f") == ["f/a.webp", "f/b/10.PNG", "f/b/2.jpg", "f/d/e/z.tiff"]
    assert names("f/") == names("f")
    assert names(str(here / "f")) == [str(here / name) for name in names("f")]


def test_a_file_is_taken_as_it_is_named(here: Path) -> None:
    touch("b", "a[1].jpg")
    assert names("b", "nowhere.jpg", "a[1].jpg") == ["b", "nowhere.jpg", "a[1].jpg"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("f/*.jpg", ["f/1.jpg", "f/2.jpg"]),
        ("f/?.jpg", ["f/1.jpg", "f/2.jpg"]),
        ("f/[!1].jpg", ["f/2.jpg"]),
        ("f/**/*.jpg", ["f/1.jpg", "f/2.jpg", "f/a/3.jpg", "f/a/b/4.jpg"]),
        ("f/**", ["f/1.jpg", "f/2.jpg", "f/a/3.jpg", "f/a/5.png", "f/a/b/4.jpg"]),
        ("**/b/*", ["f/a/b/4.jpg"]),
        ("*/a/*", ["f/a/3.jpg", "f/a/5.png", "f/a/b/4.jpg"]),  # as a shell, that gives the folder b
        ("f/[a]", ["f/a/3.jpg", "f/a/5.png", "f/a/b/4.jpg"]),
        ("f/**/*.txt", ["f/a/6.txt"]),  # who spells the ending means it
        ("f//**//3.*", ["f/a/3.jpg"]),
        ("./f/*.jpg", ["./f/1.jpg", "./f/2.jpg"]),
    ],
)
def test_patterns(here: Path, pattern: str, found: list[str]) -> None:
    touch("f/1.jpg", "f/2.jpg", "f/a/3.jpg", "f/a/b/4.jpg", "f/a/5.png", "f/a/6.txt", "f/.h/7.jpg")
    assert names(pattern) == found
    absolute = str(here / pattern)
    assert [str(Path(each)) for each in names(absolute)] == [str(here / each) for each in found]


@pytest.mark.parametrize(
    ("path", "pattern", "fits", "on_the_way"),
    [
        ("a", "**", True, True),
        ("a/b", "**/b", True, True),
        ("b", "**/b", True, True),
        ("a/b/c", "a/**/**/c", True, True),
        ("a/b", "a/*/c", False, True),
        ("b", "a/*/c", False, False),
        ("a/b/c/d", "a/*", False, True),
        ("a", "a/b", False, True),
    ],
)
def test_matching(path: str, pattern: str, fits: bool, on_the_way: bool) -> None:
    assert matches_pattern(path.split("/"), pattern.split("/")) is fits
    assert may_match_below(path.split("/"), pattern.split("/")) is on_the_way


@pytest.mark.parametrize(
    ("arguments", "found", "repeated"),
    [
        (["f/1.jpg", "f/1.jpg", "./f/1.jpg", "f/../f/1.jpg"], ["f/1.jpg"], 3),
        (["f/2.jpg", "f"], ["f/2.jpg", "f/1.jpg", "f/a/3.jpg"], 1),
        (["f", "f/2.jpg", "f/a"], ["f/1.jpg", "f/2.jpg", "f/a/3.jpg"], 2),
        (["f/*.jpg", "f"], ["f/1.jpg", "f/2.jpg", "f/a/3.jpg"], 2),
        (["link", "f/a/3.jpg", "f"], ["link/1.jpg", "link/2.jpg", "link/a/3.jpg"], 4),
        (["f", "f/nowhere.jpg", "f/nowhere.jpg"], ["f/1.jpg", "f/2.jpg", "f/a/3.jpg", "f/nowhere.jpg"], 1),
        (["f/a", "g"], ["f/a/3.jpg", "g/a/3.jpg"], 0),  # of one name, but not one file
        (["f", "f/.h/7.jpg"], ["f/1.jpg", "f/2.jpg", "f/a/3.jpg", "f/.h/7.jpg"], 0),
    ],
)
def test_what_is_given_twice_is_done_once(
    here: Path, arguments: Sequence[str], found: list[str], repeated: int
) -> None:
    touch("f/1.jpg", "f/2.jpg", "f/a/3.jpg", "g/a/3.jpg", "f/.h/7.jpg")
    Path("link").symlink_to("f")
    assert names(*arguments) == found
    assert list_images(arguments).summarize() == ImageListSummary(len(found), repeated, [])


def test_places_without_pictures_are_complained_about(here: Path) -> None:
    touch("empty/readme.txt", "f/1.jpg")
    listing = list_images(["empty", "f", "no*.jpg", "nowhere/**"])
    assert [each.name for each in listing] == ["f/1.jpg"]
    first, second, third = listing.summarize().problems
    assert first.startswith("'empty' holds no pictures; expected some in it or below")
    assert second.startswith("'no*.jpg' matches nothing; expected")
    assert third.startswith("'nowhere/**' matches nothing; expected")


def test_a_folder_that_may_not_be_read_costs_only_itself(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch("f/1.jpg", "f/locked/2.jpg", "f/z/3.jpg")
    scan = os.scandir

    def refuse(folder: str) -> object:
        if folder == "f/locked":
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    listing = list_images(["f"])
    assert [each.name for each in listing] == ["f/1.jpg", "f/z/3.jpg"]
    assert listing.summarize().problems == [
        "'f/locked' cannot be read: Permission denied; expected a folder that may be read"
    ]


def test_links_that_lead_back_or_nowhere(here: Path) -> None:
    touch("f/a/1.jpg")
    Path("f/a/back").symlink_to("..")
    Path("f/gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo("f/waits.jpg")
    assert names("f") == ["f/a/1.jpg", "f/gone.jpg"]  # the second is to be told of, and a pipe not to be waited for


def test_links_to_links_are_followed_once_and_not_by_every_way(here: Path) -> None:
    touch("last/1.jpg")
    for number in range(30):  # a billion ways to the end
        Path(f"{number}").mkdir()
        for name in ("a", "b"):
            Path(f"{number}/{name}").symlink_to("../last" if number == 29 else f"../{number + 1}")
    Path("one").symlink_to("last")
    Path("two").symlink_to("last")
    assert len(names("0")) == 1
    assert names(".")[-2:] == ["./one/1.jpg", "./two/1.jpg"]  # next to each other both are meant


def test_standard_input_is_read_once_and_not_without_end(here: Path) -> None:
    piped = BytesIO(b"x" * 100)
    listing = list_images(["-", "-"], stdin=piped, max_bytes=10)
    assert listing.summarize() == ImageListSummary(1, 1, [])
    assert piped.tell() == 0
    for _ in range(2):
        (one,) = listing
        assert (one.name, one.source) == ("-", b"x" * 11)  # a byte too many is for whoever refuses it


class Terminal(BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no pictures; expected at least one"),
        (["a.jpg", "https://example.org/a.jpg"], "'https://example.org/a.jpg' is a URL, and URLs are not fetched"),
        (["s3://bucket/a.jpg"], "'s3://bucket/a.jpg' is a URL"),
        ([""], "'' names nothing; expected a file"),
        (["-"], "- with nothing piped in; expected a picture's bytes"),
    ],
)
def test_words_that_name_no_pictures(here: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message.replace('?', '[?]')}"):
        list_images(arguments, stdin=Terminal())


def test_names_that_are_no_text(here: Path) -> None:
    strange = os.fsdecode(b"f/\xff\xfe\n.jpg")
    touch(strange, "f/" + "é" * 100 + ".jpg")
    assert sorted(names("f")) == sorted([strange, "f/" + "é" * 100 + ".jpg"])
    assert names("x" * 300) == ["x" * 300]


def test_a_long_folder_is_read_in_parts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(*(f"f/{n}.jpg" for n in range(25)))
    whole = list(scan_visible_entries("f", ordered=True))
    assert whole == sorted(whole)
    for many in (1, 5, 24, 25, 26):
        monkeypatch.setattr(image_list, "MAX_NAMES_IN_MEMORY", many)
        assert list(scan_visible_entries("f", ordered=True)) == whole


def test_a_folder_too_long_for_memory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir("f")  # noqa: PTH102
    for n in range(10_000):
        os.mknod(f"f/{n}{'long' * 40}.jpg")
    peaks = list[int]()
    for many in (100_000, 1_000):
        monkeypatch.setattr(image_list, "MAX_NAMES_IN_MEMORY", many)
        tracemalloc.start()
        assert sum(1 for _ in list_images(["f"])) == 10_000
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] > 2_000_000
    assert peaks[1] < peaks[0] / 5
