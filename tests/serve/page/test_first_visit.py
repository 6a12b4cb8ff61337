"""The first visit: a photo that is already classified and explained, four short captions, nothing from other hosts."""

from typing import TYPE_CHECKING

from support.explorer_pages import open_explorer

from vitrail.data.photos import PHOTO_FOLDER

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MAX_PAGE_BYTES = 150_000


def test_a_photo_is_classified_explained_and_checked_at_once(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address) as shown:
        shown.wait_for_check()
        assert "cat" in shown.text(".answer ol li:first-child .name")
        assert shown.page.locator(".answer ol li").count() == 5
        assert shown.text(".pane .title").startswith("What the model looked at for")
        rows = shown.page.locator(".check dt").all_inner_texts()
        assert rows == ["whole photo", "without these 20%", "without 20% at random"]
        assert "would" in shown.text(".would")
        for part in (".pane .photo", ".answer", ".check"):  # together, without scrolling
            box = shown.page.locator(part).first.bounding_box()
            assert box is not None
            assert box["y"] + 100 < 900
        shown.page.wait_for_load_state("networkidle")
        assert shown.bytes <= MAX_PAGE_BYTES


def test_the_tour_has_four_captions_and_does_not_come_back(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, tour=True) as shown:
        titles = list[str]()
        for _ in range(4):
            titles.append(shown.text("#tour-title"))
            shown.page.click("#tour-next")
        assert titles == ["Patches", "Tokens", "Attention", "Answer"]
        assert shown.page.locator("#tour").is_hidden()
        shown.page.reload()
        shown.wait_for_check()
        assert shown.page.locator("#tour").is_hidden()


def test_the_tour_can_be_skipped(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, tour=True) as shown:
        shown.page.click("#tour-skip")
        shown.page.reload()
        shown.wait_for_check()
        assert shown.page.locator("#tour").is_hidden()


def test_a_link_restores_what_was_seen(browser: "Browser", address: str) -> None:
    given = "#model=vit_fashion&photo=example%3Acoffee&view=attention&head=1&layer=2&patch=1%2C2"
    with open_explorer(browser, address, given) as shown:
        shown.wait_for_check()
        shown.page.wait_for_timeout(600)  # the link follows after a moment
        title, link = shown.text(".pane .title"), shown.page.evaluate("() => location.hash")
        assert title == "What patch 1,2 attends to, layer 2, head 1"
    with open_explorer(browser, address, link) as again:
        again.wait_for_check()
        assert again.text(".pane .title") == title
        assert again.page.evaluate("() => location.hash") == link


def test_a_link_is_followed_in_an_open_window(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10") as shown:
        shown.wait_for_check()
        shown.page.evaluate("() => { location.hash = '#model=vit_fashion&view=attention&patch=1,2' }")
        shown.page.wait_for_selector(".pane .title:has-text('What patch 1,2 attends to')")


def test_a_link_to_what_is_not_served_says_so(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=large&view=none&layer=99&head=77&patch=500,500&class=9999") as shown:
        shown.wait_for_check()
        assert shown.text("#notice") == "This server does not serve large; shown is cct_cifar10."
        assert shown.text(".pane .title").startswith("What the model looked at for")


def test_a_link_to_an_own_photo_asks_for_it(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address) as shown:
        shown.wait_for_check()
        shown.page.set_input_files("#file", PHOTO_FOLDER / "rocket.jpg")
        shown.page.wait_for_function("() => location.hash.includes('sha256')")
        link = shown.page.evaluate("() => location.hash")
    with open_explorer(browser, address, link) as again:
        again.page.wait_for_selector("#notice:not([hidden])")
        assert "checksum" in again.text("#notice")
        again.wait_for_check()
        again.page.set_input_files("#file", PHOTO_FOLDER / "rocket.jpg")
        again.page.wait_for_selector("#notice", state="hidden")
