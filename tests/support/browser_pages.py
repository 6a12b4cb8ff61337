"""Open a page in a browser: what it renders, what it requests, and whether it is legible."""

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
COLOR_SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WINDOW_WIDTHS = (360, 1200)  # a phone, a desktop

INSPECT_SCRIPT = """() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
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
  const hasText = node => [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim());
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
  const texts = [...document.body.querySelectorAll("*")].filter(node => !node.closest("svg") && hasText(node));
  return {
    figures, overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    contrast: Math.min(...texts.map(contrast)), background: behind(document.body),
    text: document.body.innerText, scripts: document.scripts.length,
  };
}"""


@dataclass(frozen=True)
class PageFigure:
    kind: str  # svg or img; figure if there is neither
    role: str
    width: float  # CSS pixels
    height: float
    alt: str
    shapes: int  # visible shapes of an SVG
    pixels: int  # width of a decoded image
    caption: str
    lost: int  # unresolved references of an SVG


@dataclass(frozen=True)
class RenderedPage:
    """A page rendered at one width in one color scheme."""

    figures: list[PageFigure]
    overflow: int  # CSS pixels beyond the right edge of the window
    contrast: float  # lowest contrast of any text (WCAG 2; 4.5 is enough for any size)
    background: list[int]
    text: str
    scripts: int
    requests: list[str]  # except the file itself and data: addresses
    errors: list[str]  # console errors and dialogs
    colors: list[int]  # number of colors of each figure on screen


def open_in_browser(browser: "Browser", path: Path, *, width: int, scheme: Literal["light", "dark"]) -> RenderedPage:
    """Open a file in the browser and inspect it."""
    requests, errors = list[str](), list[str]()
    address = path.resolve().as_uri()
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)

    def dismiss(dialog: "Dialog") -> None:
        errors.append(f"dialog: {dialog.message}")
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
        colors = [count_colors(each.screenshot()) for each in page.locator("figure .card").all()]
    finally:
        context.close()
    external = [each for each in requests if each != address and not each.startswith("data:")]
    figures = [PageFigure(**each) for each in found.pop("figures")]
    return RenderedPage(figures=figures, **found, requests=external, errors=errors, colors=colors)


def count_colors(png: bytes) -> int:
    """Number of colors in a screenshot."""
    with Image.open(BytesIO(png)) as image:
        return len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3) @ [1, 256, 65536]))


def find_page_faults(page: RenderedPage, figures: int) -> list[str]:
    """Faults of a page that should have `figures` figures; empty for a good page."""
    faults = [*(f"requested {each}" for each in page.requests), *(f"error {each}" for each in page.errors)]
    if len(page.figures) != figures:
        faults.append(f"{len(page.figures)} figures, not {figures}")
    for number, (each, colors) in enumerate(zip(page.figures, page.colors, strict=True), 1):
        drawn = each.pixels > 0 if each.kind == "img" else each.shapes > 3 and not each.lost
        if not (drawn and min(each.width, each.height) > 50 and colors > 10):
            faults.append(f"figure {number} is not drawn: {each}, {colors} colors")
        if each.role != "img" or len(each.alt) < 10 or not each.caption.startswith(f"Figure {number}. "):
            faults.append(f"figure {number} has no text alternative: {each}")
    if page.overflow > 0:
        faults.append(f"{page.overflow} pixels wider than the window")
    if page.contrast < 4.5:
        faults.append(f"text of contrast {page.contrast:.2f}")
    if page.scripts:
        faults.append(f"{page.scripts} scripts")
    return faults
