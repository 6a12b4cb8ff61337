"""The page of a translation in a browser: lines follow the selected head and the word that is pointed at."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from support.browser_pages import COLOR_SCHEMES, WINDOW_WIDTHS, find_page_faults, open_in_browser
from support.toy_translators import make_translator

from vitrail.report.translation_report import ExplainedSentence, explain_sentence, render_translation_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = "</script><i x>"
OWN_SCRIPTS = "2 scripts"  # the numbers, and the script of the page


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExplainedSentence, Path]:
    page = tmp_path_factory.mktemp("page") / "page.html"
    found = explain_sentence(make_translator(length=24), f"Der Hund läuft. {EVIL}", beam=2)
    page.write_text(render_translation_page(found), "utf-8")  # without its figures as files, which take seconds
    return found, page


@pytest.mark.parametrize(("width", "scheme"), list(product(WINDOW_WIDTHS, COLOR_SCHEMES)))
def test_the_page_has_no_faults(
    browser: "Browser", explained: tuple[ExplainedSentence, Path], width: int, scheme: Literal["light", "dark"]
) -> None:
    rendered = open_in_browser(browser, explained[1], width=width, scheme=scheme)
    assert find_page_faults(rendered, figures=4) == [OWN_SCRIPTS]
    assert EVIL in rendered.text


@pytest.fixture
def page(browser: "Browser", explained: tuple[ExplainedSentence, Path]) -> "Any":
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    page = context.new_page()
    errors = list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(explained[1].as_uri())
    yield page
    context.close()
    assert not errors


def read_values(page: "Page", side: str) -> list[str]:
    words = page.locator(f".lines >> nth=0 >> .{side} li").all()
    return [each.get_attribute("data-value") or "" for each in words]


def test_pointing_at_a_word_shows_what_it_reads(page: "Page", explained: tuple[ExplainedSentence, Path]) -> None:
    attention = explained[0].read.select_map("cross")
    assert attention is not None
    assert set(read_values(page, "read")) == {""}
    page.locator(".lines >> nth=0 >> .written li").first.hover()
    expected = [f"{np.floor(np.rint(1000 * value) / 10 + 0.5):.0f} %" for value in attention[0]]
    assert read_values(page, "read") == expected
    assert set(read_values(page, "written")) == {""}
    page.locator(".lines >> nth=0 >> .read li").nth(1).hover()
    assert len([each for each in read_values(page, "written") if each]) == len(attention)
    assert set(read_values(page, "read")) == {""}
    page.mouse.move(5, 5)
    assert set(read_values(page, "written")) == {""}


def test_lines_end_at_their_words(page: "Page") -> None:
    panel = page.locator(".lines").first
    word = panel.locator(".written li").nth(1)
    word.hover()
    box, drawn = word.bounding_box(), panel.locator("svg line").last.bounding_box()
    assert box is not None
    assert drawn is not None
    assert drawn["x"] + drawn["width"] == pytest.approx(box["x"], abs=3)
    ends = (drawn["y"], drawn["y"] + drawn["height"])
    assert any(abs(box["y"] + box["height"] / 2 - each) < 3 for each in ends)


def test_a_word_can_be_chosen_by_the_keyboard(page: "Page") -> None:
    page.locator(".lines >> nth=0 >> .written li").first.focus()
    assert all(read_values(page, "read"))


def test_another_head_and_the_occlusion_change_the_lines(
    page: "Page", explained: tuple[ExplainedSentence, Path]
) -> None:
    panel = page.locator(".lines").first
    before, note = panel.locator("svg").inner_html(), panel.locator("output").inner_text()
    assert before.count("<line") > 3
    assert note.startswith("Cross-attention, layer 1, mean of all heads: attention names the most important word for ")
    panel.locator("select[name=layer]").select_option("0")
    panel.locator("select[name=head]").select_option("1")
    assert panel.locator("output").inner_text().startswith("Cross-attention, layer 0, head 1")
    assert panel.locator("svg").inner_html() != before
    panel.get_by_label("occlusion").check()
    assert "falls without a source word" in panel.locator("output").inner_text()
    assert panel.locator("select[name=head]").is_disabled()
    panel.locator(".written li").first.hover()
    losses = explained[0].occlusion.losses[0]
    shown = [float(each.replace("−", "-")) for each in read_values(page, "read")]
    np.testing.assert_allclose(shown, [*losses, 0], atol=0.051)
