"""Sentences and captions on the same page: words × words, words × patches, each with its check."""

from typing import TYPE_CHECKING

from support.explorer_pages import open_explorer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_sentence_is_translated_and_each_word_checked(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=transformer_tatoeba&text=Ich+habe+viel+zu+tun.") as shown:
        shown.wait_for_check()
        assert shown.text(".pane .title") == "I have a lot to do."
        assert shown.page.locator(".matrix tbody tr").count() == 8
        shown.page.hover(".written li >> nth=3")
        shown.page.wait_for_selector(".status:has-text('“lot” looks most at “viel”')")
        assert "“lot”" in shown.text(".check .about")
        assert "would have said" in shown.text(".would")
        weights = shown.read_arrays()["weights"]
        assert weights.shape == (3, 4, 8, 7)
        shown.page.click("#tab-decoder")
        shown.page.wait_for_selector(".check:has-text('Only what the output looks at')")
        assert shown.page.locator(".read li").first.inner_text() == "<s>"


def test_another_sentence_is_translated(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=transformer_tatoeba") as shown:
        shown.wait_for_check()
        shown.page.click("#sentences button >> nth=1")
        shown.page.wait_for_selector(".pane .title:has-text('station')")
        shown.page.fill("#text", " ")
        shown.page.press("#text", "Enter")
        assert shown.text("#notice").startswith("There is no sentence")
        shown.page.fill("#text", "Tom schläft.")
        shown.page.press("#text", "Enter")
        shown.page.wait_for_selector(".pane .title:has-text('Tom')")
        assert "text=Tom" in shown.page.evaluate(
            "() => new Promise(done => setTimeout(() => done(location.hash), 600))"
        )
        assert shown.download("#png").startswith(b"\x89PNG")


def test_each_word_of_a_caption_has_its_map_and_check(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=captioner&photo=example:cat&view=attention") as shown:
        shown.wait_for_check()
        words = shown.page.locator(".answer .word")
        assert words.count() > 1
        words.nth(1).hover()
        shown.page.wait_for_selector(".answer .word.chosen >> nth=0")
        assert words.nth(1).get_attribute("aria-pressed") == "true"
        assert shown.page.locator("#strips .thumb").count() == 2
        assert "would have written" in shown.text(".would")
        assert shown.read_arrays()["weights"].shape[:2] == (2, 2)
