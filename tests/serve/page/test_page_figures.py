"""What the page computes agrees with `vitrail.Explainer`, and follows the mouse without asking the server."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from support.explorer_pages import ExplorerPage, open_explorer

import vitrail

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MODEL, LAYERS, GRID = "vit_fashion", 4, (4, 4)


@pytest.fixture(scope="module")
def explainer() -> vitrail.Explainer:
    return vitrail.Explainer(MODEL)


@pytest.mark.parametrize(("head", "patch"), [("mean", "1,2"), (1, "3,0")])
def test_attention_is_that_of_the_explainer(
    browser: "Browser", address: str, explainer: vitrail.Explainer, head: Literal["mean"] | int, patch: str
) -> None:
    row, heads = 1 + int(patch[0]) * 4 + int(patch[2]), [0, 1] if head == "mean" else [head]
    for layer in (0, LAYERS - 1):
        fragment = f"#model={MODEL}&photo=example:cat&view=attention&head={head}&layer={layer}&patch={patch}"
        with open_explorer(browser, address, fragment) as shown:
            shown.wait_for_check()
            arrays = shown.read_arrays()
        attention = explainer.explain("example:cat", "heads", layer=layer, token=patch).attention
        assert attention is not None
        expected = attention[heads].mean(0)[1:].reshape(GRID)
        scale = arrays["scale"][layer, heads, row]
        patches = (arrays["maps"][layer, heads, row, 1:].sum(-1) * scale / 255).mean()  # the map is divided by this sum
        assert np.abs(arrays["map"] / 16 * patches - expected).max() <= 0.002 * scale.max()


def test_rollout_and_relevance_are_those_of_the_explainer(
    browser: "Browser", address: str, explainer: vitrail.Explainer
) -> None:
    base = f"#model={MODEL}&photo=example:cat&layer=3"
    with open_explorer(browser, address, f"{base}&view=rollout&patch=2,1") as shown:
        shown.wait_for_check()
        found = shown.read_arrays()["map"] / 16
    np.testing.assert_allclose(found, explainer.explain("example:cat", "rollout", token="2,1").map, atol=1e-3)
    with open_explorer(browser, address, f"{base}&view=class&class=2") as shown:
        shown.wait_for_check()
        arrays = shown.read_arrays()
    expected = explainer.explain("example:cat", "grad-rollout", of_class=2).map
    np.testing.assert_allclose(arrays["map"] / 16, expected, atol=1e-3)
    np.testing.assert_allclose(arrays["norms"], explainer.explain("example:cat", "norms", layer="all").maps[:, 0], 1e-4)


def read_place(shown: ExplorerPage) -> dict[str, Any]:
    about = json.loads(str(shown.read_arrays()["about"]))
    return {"grid": tuple(about["grid"]), "box": tuple(about["box"]), "photo": tuple(about["photo"])}


def test_the_map_follows_the_mouse_without_a_request(
    browser: "Browser", address: str, record_property: Callable[[str, object], None]
) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10&photo=example:cat&view=rollout") as shown:
        shown.wait_for_check()
        place = read_place(shown)
        shown.point_at(0, 0, **place)
        shown.page.wait_for_timeout(800)  # what was asked for has come
        before, titles = len(shown.requests), set[str]()
        shown.page.evaluate(
            "() => { window.drawTimes.length = 0; window.frames_ = 0; window.start_ = performance.now(); }"
        )
        for step in range(300):
            shown.point_at(step // 8 % 8, step % 8, **place)
            if step % 50 == 0:
                shown.page.wait_for_timeout(50)
                titles.add(shown.text(".pane .title"))
        measured = shown.page.evaluate(
            "() => ({times: window.drawTimes, rate: 1000 * window.frames_ / (performance.now() - window.start_)})"
        )
        assert len(shown.requests) == before
        assert len(titles) >= 4
        assert all(title.startswith("What reached patch") for title in titles)
        record_property("frames per second", round(measured["rate"], 1))
        record_property(
            "draw p50, p99 (ms)", [round(float(each), 2) for each in np.quantile(measured["times"], (0.5, 0.99))]
        )


def test_a_click_keeps_the_patch_and_c_returns_to_the_class_token(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, f"#model={MODEL}&photo=example:cat&view=attention") as shown:
        shown.wait_for_check()
        place = read_place(shown)
        shown.point_at(1, 1, **place)
        shown.page.mouse.down()
        shown.page.mouse.up()
        shown.page.mouse.move(1, 1)
        shown.page.wait_for_selector(".pane .title:has-text('patch 1,1')")
        shown.page.keyboard.press("c")
        shown.page.wait_for_selector(".pane .title:has-text('all patches on average')")


FIGURES = {
    "attention": ".panel .thumb",
    "rollout": ".panel .thumb",
    "class": ".panel .thumb",
    "norms": ".panel .thumb",
    "positions": ".panel .framed canvas",
    "lens": ".panel .lens tbody tr",
    "distance": ".panel .dot",
}


def test_every_tab_has_its_figure_and_says_what_it_does_not_show(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10&photo=example:cat") as shown:
        shown.wait_for_check()
        for view, figure in FIGURES.items():
            shown.page.click(f"#tab-{view}")
            shown.page.wait_for_selector(f".panel .body[data-view={view}]")
            shown.page.wait_for_selector(figure)
            assert shown.page.locator(figure).count() == {"distance": 32, "positions": 1}.get(view, 4)
            assert len(shown.text("#shows")) > 40
            assert len(shown.text("#not")) > 20
        shown.page.hover('.dot[data-layer="1"][data-head="3"]', force=True)
        shown.page.wait_for_selector(".pane .title:has-text('layer 1, head 3')")


def test_hidden_patches_change_the_answer(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10&photo=example:cat") as shown:
        shown.wait_for_check()
        shown.page.click(".brightest")
        shown.page.wait_for_selector(".class .before")
        assert "was" in shown.text(".class .before")
        without = shown.page.locator(".check dd").nth(1).inner_text()
        assert shown.text(".answer ol .number") == without  # the same patches as in the check
        shown.page.click(".clear")
        shown.page.wait_for_selector(".class .before", state="detached")


def test_two_models_are_linked(browser: "Browser", address: str) -> None:
    fragment = "#model=cct_cifar10&with=vit_fashion&photo=example:cat&view=attention"
    with open_explorer(browser, address, fragment) as shown:
        shown.page.wait_for_function("() => document.querySelectorAll('.check:not(.stale) dl').length === 2")
        place = read_place(shown)
        shown.point_at(5, 5, **place)
        shown.page.wait_for_function(
            "() => [...document.querySelectorAll('.pane .title')].every(each => /patch \\d/.test(each.textContent))"
        )
        titles = shown.page.locator(".pane .title").all_inner_texts()
        assert "patch 5,5" in titles[0]
        assert "patch 2,2" in titles[1]  # the same place in 4×4 patches
        assert "looked more there" in shown.text("#difference .status")


def test_the_figure_is_saved_as_a_png(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10&photo=example:cat") as shown:
        shown.wait_for_check()
        assert shown.download("#png").startswith(b"\x89PNG")
