"""The explorer in a browser: open it, point at patches, read what it shows and what it downloads."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COUNT_FRAMES_SCRIPT = """
  window.drawTimes = []; window.frames_ = 0;
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = draw => request(time => {
    const start = performance.now(); draw(time); window.drawTimes.push(performance.now() - start);
  });
  const count = () => { window.frames_++; request(count); };
  request(count);
"""
SKIP_TOUR_SCRIPT = "localStorage.setItem('vitrail-tour', '1')"
UNNAMED_SCRIPT = """() => [...document.querySelectorAll('button, input, select, canvas, img, [role=tab]')]
  .filter(node => node.checkVisibility() && !(node.getAttribute('aria-label') || node.getAttribute('alt') !== null ||
    node.labels?.length || node.textContent.trim() || node.closest('[aria-hidden], button')))
  .map(node => node.outerHTML.slice(0, 120))"""


class ExplorerPage:
    """A page with what it requested and what went wrong in it."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.requests, self.errors, self.foreign = list[str](), list[str](), list[str]()
        self.bytes = 0  # of the page itself: no photos, no figures

    def wait_for_check(self) -> None:
        """Until the map is drawn and checked."""
        self.page.wait_for_selector(".check:not(.stale) dl", timeout=60_000)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def point_at(
        self, row: int, column: int, grid: tuple[int, int], box: tuple[float, ...], photo: tuple[int, int]
    ) -> None:
        """Move the mouse to the middle of a patch; the box is that of the model's input in the photo."""
        area = self.page.locator(".pane canvas").first.bounding_box()
        assert area is not None
        y = (box[0] + (row + 0.5) * box[2] / grid[0]) / photo[0]
        x = (box[1] + (column + 0.5) * box[3] / grid[1]) / photo[1]
        self.page.mouse.move(area["x"] + x * area["width"], area["y"] + y * area["height"])

    def download(self, selector: str) -> bytes:
        with self.page.expect_download() as waiting:
            self.page.click(selector)
        return waiting.value.path().read_bytes()

    def read_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that the page shows, from its .npz."""
        with self.page.expect_download() as waiting:
            self.page.click("#npz")
        with np.load(waiting.value.path(), allow_pickle=False) as found:
            return dict(found)


@contextmanager
def open_explorer(
    browser: "Browser",
    address: str,
    fragment: str = "",
    *,
    size: tuple[int, int] = (1200, 900),
    scheme: Literal["light", "dark"] = "light",
    reduced: bool = False,
    tour: bool = False,
    expect_errors: bool = False,
) -> Generator[ExplorerPage]:
    """The page at an address; it must not write to the console or ask another host for anything."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        reduced_motion="reduce" if reduced else "no-preference",
    )
    host = urlsplit(address).netloc
    try:
        shown = ExplorerPage(context.new_page())
        page = shown.page
        page.add_init_script(COUNT_FRAMES_SCRIPT)
        if not tour:
            page.add_init_script(SKIP_TOUR_SCRIPT)

        def note(request: Any) -> None:
            shown.requests.append(request.url)
            parts = urlsplit(request.url)
            if parts.scheme in ("http", "https") and parts.netloc != host:
                shown.foreign.append(request.url)

        def measure(request: Any) -> None:
            path = urlsplit(request.url).path
            if request.method == "GET" and not path.startswith("/examples/"):
                shown.bytes += request.sizes()["responseBodySize"]

        def refuse(dialog: Any) -> None:
            shown.errors.append(dialog.message)
            dialog.dismiss()

        page.on("request", note)
        page.on("requestfinished", measure)
        page.on("console", lambda line: shown.errors.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: shown.errors.append(str(error)))
        page.on("dialog", refuse)
        page.goto(f"{address}/{fragment}")
        yield shown
        assert not shown.foreign
        assert expect_errors or not shown.errors
    finally:
        context.close()
