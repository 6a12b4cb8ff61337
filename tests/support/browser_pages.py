"""What a browser makes of a page on disk, for tests: what it drew, what it asked for, and whether it can be read."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog

CHROMIUM_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
COLOUR_SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WINDOW_WIDTHS = (360, 1200)  # a phone, a desk

INSPECT_SCRIPT = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
      if (a > 0) throw new Error(`half transparent: ${node.tagName}`);
    }
    return [255, 255, 255];
  };
  const contrast = node => {
    const pair = [light(numbers(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  };
  const said = node => [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim());
  const figures = [...document.querySelectorAll("figure")].map(figure => {
    const drawn = figure.querySelector("svg, img") || figure, box = drawn.getBoundingClientRect();
    const shapes = [...drawn.querySelectorAll("path, use, image")].filter(each => {
      const { width, height } = each.getBoundingClientRect();
      return width + height > 0 && !each.closest("defs");
    });
    return {
      kind: drawn.localName, role: drawn.getAttribute("role") || "", width: box.width, height: box.height,
      alt: drawn.getAttribute("aria-label") || drawn.getAttribute("alt") || "", shapes: shapes.length,
      pixels: drawn.naturalWidth || 0, caption: (figure.querySelector("figcaption") || figure).innerText,
      lost: [...drawn.querySelectorAll("use")].filter(
        each => !drawn.querySelector(`[id="${each.getAttribute("href").slice(1)}"]`)).length,
    };
  });
  const texts = [...document.body.querySelectorAll("*")].filter(node => !node.closest("svg") && said(node));
  return {
    figures, overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    contrast: Math.min(...texts.map(contrast)), background: behind(document.body),
    text: document.body.innerText, scripts: document.scripts.length,
  };
}"""


@dataclass(frozen=True)
class PageFigure:
    kind: str  # svg or img; figure where there is neither
    role: str
    width: float  # CSS pixels
    height: float
    alt: str
    shapes: int  # of an SVG, that take up room
    pixels: int  # of an image, across, once it is decoded
    caption: str
    lost: int  # letters and marks of an SVG that lead nowhere


@dataclass(frozen=True)
class RenderedPage:
    """A page as it was shown at one width in one colour scheme."""

    figures: list[PageFigure]
    overflow: int  # CSS pixels to the right of the window
    contrast: float  # of the text that is the hardest to read (WCAG 2; 4.5 is enough for any size)
    background: list[int]
    text: str
    scripts: int
    requests: list[str]  # but the file itself and data: addresses
    errors: list[str]  # on the console, dialogues included
    colours: list[int]  # of the screen: how many each figure has


def open_in_browser(browser: "Browser", path: Path, *, width: int, scheme: Literal["light", "dark"]) -> RenderedPage:
    """Opens a file as a reader would."""
    requests, errors = list[str](), list[str]()
    address = path.resolve().as_uri()
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)

    def dismiss(dialog: "Dialog") -> None:
        errors.append(f"dialogue: {dialog.message}")
        dialog.dismiss()

    try:
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", dismiss)
        page.goto(address, wait_until="load")
        found: dict[str, Any] = page.evaluate(INSPECT_SCRIPT)
        colours = [count_colours(each.screenshot()) for each in page.locator("figure .card").all()]
    finally:
        context.close()
    asked = [each for each in requests if each != address and not each.startswith("data:")]
    figures = [PageFigure(**each) for each in found.pop("figures")]
    return RenderedPage(figures=figures, **found, requests=asked, errors=errors, colours=colours)


def count_colours(png: bytes) -> int:
    """How many colours a screenshot has."""
    with Image.open(BytesIO(png)) as image:
        return len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3) @ [1, 256, 65536]))


def find_page_faults(seen: RenderedPage, figures: int) -> list[str]:
    """What is wrong with a page that should have so many figures; of a good one nothing."""
    found = [*(f"asked for {each}" for each in seen.requests), *(f"said {each}" for each in seen.errors)]
    if len(seen.figures) != figures:
        found.append(f"{len(seen.figures)} figures, not {figures}")
    for number, (each, colours) in enumerate(zip(seen.figures, seen.colours, strict=True), 1):
        drawn = each.pixels > 0 if each.kind == "img" else each.shapes > 3 and not each.lost
        if not (drawn and min(each.width, each.height) > 50 and colours > 10):
            found.append(f"figure {number} is not drawn: {each}, {colours} colours")
        if each.role != "img" or len(each.alt) < 10 or not each.caption.startswith(f"Figure {number}. "):
            found.append(f"figure {number} does not say what it shows: {each}")
    if seen.overflow > 0:
        found.append(f"{seen.overflow} pixels wider than the window")
    if seen.contrast < 4.5:
        found.append(f"text of contrast {seen.contrast:.2f}")
    if seen.scripts:
        found.append(f"{seen.scripts} scripts")
    return found
