"""Keyboard alone, a screen reader's line, reduced motion, the width of a phone, light and dark."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from support.browser_pages import COLOR_SCHEMES, INSPECT_SCRIPT, WINDOW_WIDTHS
from support.explorer_pages import UNNAMED_SCRIPT, open_explorer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {
    "class": "#model=cct_cifar10&view=class",
    "distance": "#model=cct_cifar10&view=distance",
    "positions": "#model=cct_cifar10&view=positions",
    "lens": "#model=cct_cifar10&view=lens",
    "two models": "#model=cct_cifar10&with=vit_fashion&view=attention&patch=1,1",
    "sentence": "#model=transformer_tatoeba",
    "caption": "#model=captioner",
}
READY = ".check .result > *"


@pytest.mark.parametrize(("width", "scheme"), list(zip(WINDOW_WIDTHS, reversed(COLOR_SCHEMES), strict=True)))
def test_every_view_is_legible_and_named(
    browser: "Browser", address: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    faults = list[str]()
    for name, fragment in PAGES.items():
        with open_explorer(browser, address, fragment, size=(width, 800), scheme=scheme, reduced=True) as shown:
            shown.page.wait_for_selector(READY)
            shown.page.click("#help")
            shown.page.wait_for_timeout(300)
            found = shown.page.evaluate(INSPECT_SCRIPT)
            if found["overflow"] > 0:
                faults.append(f"{name}: {found['overflow']} pixels too wide")
            if found["contrast"] < 4.5:
                faults.append(f"{name}: contrast {found['contrast']:.2f}")
            faults += [f"{name}: no name: {each}" for each in shown.page.evaluate(UNNAMED_SCRIPT)]
    assert not faults


AXE_SCRIPT = """async () => (await axe.run(document)).violations
  .filter(each => ["serious", "critical"].includes(each.impact))
  .map(each => `${each.id}: ${each.nodes[0].html.slice(0, 100)}`)"""


@pytest.mark.slow
@pytest.mark.parametrize("width", WINDOW_WIDTHS)
@pytest.mark.parametrize("scheme", COLOR_SCHEMES)
def test_axe_has_no_serious_finding(
    browser: "Browser", address: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    source = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
    if not source.exists():
        pytest.skip("needs axe-core: npm install axe-core")
    faults = list[str]()
    for name, fragment in PAGES.items():
        with open_explorer(browser, address, fragment, size=(width, 800), scheme=scheme, reduced=True) as shown:
            shown.page.wait_for_selector(READY)
            shown.page.click("#help")
            shown.page.evaluate(source.read_text("utf-8"))
            faults += [f"{name}: {each}" for each in shown.page.evaluate(AXE_SCRIPT)]
    assert not faults


def test_the_keyboard_reaches_everything(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10&photo=example:cat&view=attention") as shown:
        shown.wait_for_check()
        press, title = shown.page.keyboard.press, ".pane .title"
        press("ArrowRight")
        shown.page.wait_for_selector(f"{title}:has-text('patch 4,4')")
        press("ArrowUp")
        shown.page.wait_for_selector(f"{title}:has-text('patch 3,4')")
        shown.page.wait_for_function(
            "() => document.querySelector('#live').textContent.includes('patch 3,4 attends most')"
        )
        press("-")
        shown.page.wait_for_selector(f"{title}:has-text('layer 2')")
        press("2")
        shown.page.wait_for_selector(f"{title}:has-text('head 2')")
        press("m")
        press("+")
        shown.page.wait_for_selector(f"{title}:has-text('layer 3')")
        press("b")
        press("Space")
        shown.page.wait_for_selector(".class .before")
        press("Escape")
        press("c")
        shown.page.wait_for_function("() => !document.querySelector('.pane .title').textContent.includes('patch 3,4')")
        press("?")
        assert shown.page.locator("#keys").is_visible()
        reached = set[str]()
        shown.page.evaluate("() => document.activeElement.blur()")
        for _ in range(90):
            press("Tab")
            reached.add(shown.page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        for control in ("model", "compare", "link", "png", "npz", "help", "file", "folder", "layer", "class", "thumb"):
            assert control in reached, control
        assert "tab-attention" in reached  # the arrow keys lead to the other tabs
        shown.page.focus("#tab-attention")
        press("ArrowRight")
        shown.page.wait_for_selector("#tab-rollout[aria-selected=true]")


def test_the_focus_is_visible(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address) as shown:
        shown.wait_for_check()
        for _ in range(6):
            shown.page.keyboard.press("Tab")
            width = shown.page.evaluate(
                "() => { const at = document.activeElement, near = at.closest('.open') || at;"
                " return parseFloat(getComputedStyle(near).outlineWidth) }"
            )
            assert width >= 2


def test_nothing_moves_with_reduced_motion(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, reduced=True) as shown:
        shown.wait_for_check()
        moving = shown.page.evaluate(
            """() => [...document.querySelectorAll('*')].filter(each => [null, '::before'].some(part => {
              const style = getComputedStyle(each, part);
              return style.transitionDuration !== '0s' || style.animationName !== 'none';
            })).length"""
        )
        assert moving == 0
