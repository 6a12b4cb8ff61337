"""Pages in a browser: from disk, at the width of a phone and of a desktop, in light and dark mode."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from support.browser_pages import COLOR_SCHEMES, WINDOW_WIDTHS, find_page_faults, open_in_browser

from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import FIGURE_WIDTH, SEQUENTIAL_MAP
from vitrail.cli import build_app
from vitrail.report.html_page import PageSection, render_page, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

EVIL = "<script>alert(1)</script>"


def captioned(kind: Literal["lines", "map", "photo", "dots"], width: float, height: float) -> CaptionedFigure:
    rng = np.random.default_rng(0)

    def draw():
        figure = new_figure(width, height)
        axes = figure.subplots()
        if kind == "lines":
            axes.plot(rng.random((12, 3)), label=["a", "b", EVIL])
            axes.legend()
        elif kind == "dots":
            axes.scatter(*rng.random((2, 5000)), s=1, c=rng.random(5000), cmap=SEQUENTIAL_MAP)
        else:
            axes.imshow(rng.random((5, 8) if kind == "map" else (99, 160, 3)), cmap=SEQUENTIAL_MAP)
        axes.set(xlabel="depth", ylabel=f"pixels, {EVIL}", title=kind)
        return figure

    return CaptionedFigure(name=kind, title=kind, caption=f"A caption of {kind} and {EVIL}.", arrays={}, draw=draw)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything, including long and malicious names."""
    long = "a_name_without_an_end_" * 12
    rows = [(EVIL, "97.1%", long), ('"><img src=x onerror=alert(1)>', "0.3%", "bee\u202e\x00\udcff")]
    many = [(*(f"{n}·{m}" for m in range(30)),) for n in range(3)]
    sections = [
        PageSection(title=f"Answers {EVIL}", text=f"{long}\n\n{EVIL}", table=(("photo", "share", "note"), rows, "lrl")),
        PageSection(
            title="Maps", figures=[captioned("lines", 7, 4), captioned("map", 11, 4), captioned("lines", 3, 2)]
        ),
        PageSection(
            title="Photos", figures=[captioned("photo", 4, 3), captioned("dots", 5, 4)], table=(many[0], many, 30 * "r")
        ),
        PageSection(title=long, preformatted=f"{long} {EVIL}\n" * 3),
    ]
    path = tmp_path_factory.mktemp("page") / "a page #1 & more?.html"
    write_page(render_page(f"A model {EVIL}", f"What it sees. {long}", sections), path)
    return path


@pytest.mark.parametrize(("width", "scheme"), list(product(WINDOW_WIDTHS, COLOR_SCHEMES)))
def test_page_is_rendered_without_faults(
    browser: "Browser", page: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    rendered = open_in_browser(browser, page, width=width, scheme=scheme)
    assert find_page_faults(rendered, figures=5) == []
    assert [each.kind for each in rendered.figures] == ["svg", "svg", "svg", "svg", "img"]
    assert (sum(rendered.background) < 150) == (scheme == "dark")
    assert rendered.text.count(EVIL) == 2 + 3 + 5 + 3  # title and contents, table and text, captions, preformatted


def test_figures_keep_their_size_up_to_that_of_the_page(browser: "Browser", page: Path) -> None:
    wide = [each.width for each in open_in_browser(browser, page, width=1200, scheme="light").figures]
    assert wide == pytest.approx([7 * 96, FIGURE_WIDTH * 96, 3 * 96, 4 * 96, 5 * 96], abs=3)
    phone = [each.width for each in open_in_browser(browser, page, width=360, scheme="light").figures]
    assert phone == pytest.approx([7 * 48, 11 * 48, 3 * 96, 312, 312], abs=3)  # text stays legible


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (("<main>", "<main><script>0</script>"), "error "),
        (("<main>", '<main><img src="https://vitrail.invalid/a.png">'), "error "),
        (("<main>", '<main><img src="beside.png">'), "error "),
        (('href="#figure-2-', 'href="#figure-9-'), "figure 2 is not drawn"),
        (("data:image/webp;base64,UklGR", "data:image/webp;base64,AAAAA"), "figure "),
        (("--ink:#22262b", "--ink:#999999"), "text of contrast 2."),
        (("overflow-wrap:anywhere", "overflow-wrap:normal"), "pixels wider than the window"),
        (('role="img"', ""), "figure 1 has no text alternative"),
        (("</main>", "<figure><div class=card></div></figure></main>"), "figure 6 is not drawn"),
    ],
)
def test_page_checks_can_fail(
    browser: "Browser", page: Path, tmp_path: Path, damage: tuple[str, str], fault: str
) -> None:
    text = page.read_text("utf-8")
    assert damage[0] in text
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace(*damage), "utf-8")
    found = find_page_faults(open_in_browser(browser, broken, width=360, scheme="light"), figures=5)
    assert any(fault in each for each in found), found


def test_content_security_policy_prevents_requests(browser: "Browser", page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8").replace("http-equiv", "name")
    leaking = tmp_path / "leaking.html"
    leaking.write_text(text.replace("<main>", '<main><img src="beside.png"><script>alert(1)</script>'), "utf-8")
    found = find_page_faults(open_in_browser(browser, leaking, width=360, scheme="light"), figures=5)
    assert f"requested {(tmp_path / 'beside.png').as_uri()}" in found
    assert "error dialog: 1" in found
    assert "1 scripts" in found


def test_lessons_page(browser: "Browser", tmp_path: Path) -> None:
    build_app()(["look", "--lessons", "-o", str(tmp_path / "lessons.html")], result_action="return_value")
    for width in WINDOW_WIDTHS:
        assert (
            find_page_faults(open_in_browser(browser, tmp_path / "lessons.html", width=width, scheme="dark"), figures=3)
            == []
        )
