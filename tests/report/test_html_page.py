"""The HTML of a page is complete, safe and reproducible; test_html_page_in_browser.py tests its rendering."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.text import escape_unprintable
from vitrail.report.html_page import KEPT_CHARACTERS, PageSection, render_page, write_page

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

EVIL = "<script>alert(1)</script>"
VOID = ("meta", "img")


class Reader(HTMLParser):
    """Collects tags, attributes and text; fails on tags that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text, self.open = list[tuple[str, dict[str, str | None]]](), "", list[str]()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def lines(name: str = "lines", title: str = "Lines", caption: str = "They rise.") -> CaptionedFigure:
    def draw():
        figure = new_figure(4, 3)
        axes = figure.subplots()
        axes.plot([0, 1, 5])
        axes.set(xlabel="depth", ylabel=f"pixels of {EVIL}")
        return figure

    return CaptionedFigure(name=name, title=title, caption=caption, arrays={}, draw=draw)


def noise() -> CaptionedFigure:
    """A figure with so many dots that PNG is smaller than SVG."""
    rng = np.random.default_rng(0)

    def draw():
        figure = new_figure(3, 3)
        axes = figure.subplots()
        axes.scatter(*rng.random((2, 5000)), s=1)
        return figure

    return CaptionedFigure(name="noise", title="Noise", caption="Only noise.", arrays={}, draw=draw)


def test_a_page_with_everything() -> None:
    table = (("photo", "share"), [(EVIL, "97%"), ("\"&'", "3%")], "lr")
    first = PageSection(title="First & foremost", text="One.\n\nTwo.", figures=[lines(), lines()], table=table)
    page = render_page(
        f"Title {EVIL}", "A lead.", [first, PageSection(title="Last", preformatted="a  <b>\nc", figures=[noise()])]
    )
    read = Reader(page)
    tags = [tag for tag, _ in read.tags]
    assert "script" not in tags
    assert read.text.count(EVIL) == 3  # <title>, <h1>, the table
    assert "a  <b>\nc" in read.text
    assert "\"&'" in read.text
    assert (tags.count("p"), tags.count("h2"), tags.count("figure"), tags.count("tr")) == (3, 2, 3, 3)
    assert (tags.count("svg"), tags.count("img")) == (2, 1)  # five thousand dots are smaller as WebP
    assert [found.get("class") for tag, found in read.tags if tag in ("th", "td")] == 3 * [None, "r"]
    assert [found["href"] for tag, found in read.tags if tag == "a"] == ["#section-1", "#section-2"]
    assert "Figure 3. Noise." in read.text


def test_page_fetches_and_runs_nothing() -> None:
    page = render_page("A", "B", [PageSection(title="C", figures=[lines(), noise()])])
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\((?!#)|\son\w+=|javascript:""", page)
    policy = next(found["content"] for _, found in Reader(page).tags if found.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "<nav" not in page  # not for a single section


def test_ids_are_unique_and_references_resolve() -> None:
    page = render_page(
        "A", "B", [PageSection(title="C", figures=[lines(), lines()]), PageSection(title="D", figures=[lines()])]
    )
    found = [attributes for _, attributes in Reader(page).tags]
    ids = [each["id"] for each in found if "id" in each]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert len(references) > 30  # glyphs, ticks and clips of three figures
    assert references <= set(ids)


def test_every_figure_has_a_text_alternative() -> None:
    captioned = lines(title='A "title".', caption=f"{EVIL} & more\udcff")
    read = Reader(render_page("A", "B", [PageSection(title="C", figures=[captioned, noise()])]))
    alternatives = [found.get("aria-label") or found.get("alt") for _, found in read.tags if found.get("role") == "img"]
    assert alternatives == [f'A "title". {EVIL} & more\\udcff', "Noise. Only noise."]
    assert f'Figure 1. A "title". {EVIL} & more\\udcff' in read.text


def test_pages_are_reproducible() -> None:
    sections = [PageSection(title="C", figures=[lines(), lines()])]
    assert render_page("A", "B", sections) == render_page("A", "B", sections)


def test_any_text_is_escaped() -> None:
    assert (
        escape_unprintable("Käfer 日本\u3000\xa0\t\n👩\u200d🔬", KEPT_CHARACTERS)
        == "Käfer 日本\u3000\xa0\t\n👩\u200d🔬"
    )
    assert escape_unprintable("a\x00\x1b\u202e\udcff", KEPT_CHARACTERS) == r"a\x00\x1b\u202e\udcff"


def test_uneven_table_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        render_page("A", "B", [PageSection(title="C", table=(("a", "b"), [("1",)], "ll"))])


def test_write_page(tmp_path: Path) -> None:
    page = render_page("A\udcff", "B", [])
    write_page(page, tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text("utf-8") == page
    with pytest.raises(ConfigError, match=r"page\.txt; expected a name that ends in \.html$"):
        write_page(page, tmp_path / "page.txt")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        write_page(page, tmp_path / "new" / "page.html" / "page.html")


def test_a_page_without_figures_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<h2" in render_page("A", "B", [PageSection(title="C", text="D")])
    with pytest.raises(ConfigError, match=r"needs matplotlib"):
        render_page("A", "B", [PageSection(title="C", figures=[lines()])])
