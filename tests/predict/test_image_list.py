"""Which images the arguments name, and in which order."""

import os
import tracemalloc
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest

from vitrail.base.errors import ConfigError, DataError
from vitrail.predict import image_list
from vitrail.predict.image_list import (
    ImageListSummary,
    collect_images,
    list_images,
    matches_pattern,
    may_match_below,
    scan_visible_entries,
    unreadable_images_error,
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
    """As listed, and counted alike."""
    listing = list_images(arguments)
    found = [each.name for each in listing]
    assert listing.summarize().images == len(found)
    return found


def test_a_folder_is_listed_with_its_subfolders_in_order(here: Path) -> None:
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
        ("f/**/*.txt", ["f/a/6.txt"]),  # a pattern with a suffix takes any file
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
        (["f/a", "g"], ["f/a/3.jpg", "g/a/3.jpg"], 0),  # the same name, but not the same file
        (["f", "f/.h/7.jpg"], ["f/1.jpg", "f/2.jpg", "f/a/3.jpg", "f/.h/7.jpg"], 0),
    ],
)
def test_a_file_named_twice_is_listed_once(
    here: Path, arguments: Sequence[str], found: list[str], repeated: int
) -> None:
    touch("f/1.jpg", "f/2.jpg", "f/a/3.jpg", "g/a/3.jpg", "f/.h/7.jpg")
    Path("link").symlink_to("f")
    assert names(*arguments) == found
    assert list_images(arguments).summarize() == ImageListSummary(len(found), repeated, [])


def test_arguments_without_images_are_problems(here: Path) -> None:
    touch("empty/readme.txt", "f/1.jpg")
    listing = list_images(["empty", "f", "no*.jpg", "nowhere/**"])
    assert [each.name for each in listing] == ["f/1.jpg"]
    first, second, third = listing.summarize().problems
    assert first.startswith("'empty' has no images; expected some in it or its subfolders")
    assert second.startswith("'no*.jpg' matches no images; expected")
    assert third.startswith("'nowhere/**' matches no images; expected")


def test_an_unreadable_folder_is_a_problem_and_the_others_are_listed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch("f/1.jpg", "f/locked/2.jpg", "f/z/3.jpg")
    scan = os.scandir

    def refuse(folder: str) -> object:
        if folder == "f/locked":
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    listing = list_images(["f"])
    assert [each.name for each in listing] == ["f/1.jpg", "f/z/3.jpg"]
    assert listing.summarize().problems == ["'f/locked' cannot be read: Permission denied; expected a readable folder"]


def test_links_to_a_parent_and_broken_links(here: Path) -> None:
    touch("f/a/1.jpg")
    Path("f/a/back").symlink_to("..")
    Path("f/gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo("f/waits.jpg")
    assert names("f") == ["f/a/1.jpg", "f/gone.jpg"]  # a broken link is reported later; a pipe would block


def test_links_to_links_are_followed_once(here: Path) -> None:
    touch("last/1.jpg")
    for number in range(30):  # a billion paths to the end
        Path(f"{number}").mkdir()
        for name in ("a", "b"):
            Path(f"{number}/{name}").symlink_to("../last" if number == 29 else f"../{number + 1}")
    Path("one").symlink_to("last")
    Path("two").symlink_to("last")
    assert len(names("0")) == 1
    assert names(".")[-2:] == ["./one/1.jpg", "./two/1.jpg"]  # both links are listed


def test_standard_input_is_read_once_up_to_the_limit(here: Path) -> None:
    piped = BytesIO(b"x" * 100)
    listing = list_images(["-", "-"], stdin=piped, max_bytes=10)
    assert listing.summarize() == ImageListSummary(1, 1, [])
    assert piped.tell() == 0
    for _ in range(2):
        (one,) = listing
        assert (one.name, one.source) == ("-", b"x" * 11)  # one byte more than the limit, so that it is refused later


class Terminal(BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no images; expected at least one"),
        (["a.jpg", "https://example.org/a.jpg"], "'https://example.org/a.jpg' is a URL, and URLs are not fetched"),
        (["s3://bucket/a.jpg"], "'s3://bucket/a.jpg' is a URL"),
        ([""], "'' is not a path; expected a file"),
        (["-"], "- reads an image from standard input, which is a terminal"),
    ],
)
def test_arguments_that_name_no_images(here: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message.replace('?', '[?]')}"):
        list_images(arguments, stdin=Terminal())


def test_names_that_are_not_valid_utf_8(here: Path) -> None:
    strange = os.fsdecode(b"f/\xff\xfe\n.jpg")
    touch(strange, "f/" + "é" * 100 + ".jpg")
    assert sorted(names("f")) == sorted([strange, "f/" + "é" * 100 + ".jpg"])
    assert names("x" * 300) == ["x" * 300]


def test_a_large_folder_is_read_in_parts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(*(f"f/{n}.jpg" for n in range(25)))
    whole = list(scan_visible_entries("f", ordered=True))
    assert whole == sorted(whole)
    for many in (1, 5, 24, 25, 26):
        monkeypatch.setattr(image_list, "MAX_NAMES_IN_MEMORY", many)
        assert list(scan_visible_entries("f", ordered=True)) == whole


def test_a_large_folder_takes_little_memory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_images_are_collected_with_the_problems_of_the_other_arguments(here: Path) -> None:
    touch("f/a/1.jpg", "empty/readme.txt")
    images, problems = collect_images(["nowhere.jpg", "f", "empty"])
    assert [each.name for each in images] == ["nowhere.jpg", "f/a/1.jpg"]
    assert [problem.split(";")[0] for problem in problems] == ["'empty' has no images"]
    with pytest.raises(DataError, match=r"^'empty' has no images; expected some in it or its subfolders \(.*\)$"):
        collect_images(["empty"])
    with pytest.raises(DataError, match=r"^'empty' has no images; .*; 1 more have none either$"):
        collect_images(["empty", "x*"])


def test_skipped_images_are_counted_in_one_sentence() -> None:
    assert unreadable_images_error(0, 5) is None
    assert str(unreadable_images_error(2, 5)) == "2 of 5 images could not be read"
    assert str(unreadable_images_error(0, 5, ["a"])) == "1 of the arguments could not be read"
    assert str(unreadable_images_error(2, 5, ["a", "b"], Path("out.csv"))) == (
        "2 of 5 images and 2 of the arguments could not be read; the results of the others are in out.csv"
    )
