"""Take the screenshots of docs/explorer.md: every view in light and dark, on a desktop and on a phone.

    python docs/figures/make_explorer_screenshots.py [--model NAME=MODEL] [--other NAME=MODEL] [--captioner FOLDER]

Needs Chromium (`make browser`) and the extras `serve` and `test`. The pages are those of `vitrail serve`.
Without --out FOLDER, only the screenshots that the docs show are written, with few colors so that they stay small.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from cyclopts import run
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from vitrail.data.photos import PHOTO_FOLDER

FOLDER = Path(__file__).parent
DESKTOP, PHONE = (1200, 860), (360, 780)
COLORS = 256  # of a PNG in the docs
READY = ".check:not(.stale) .result > *"
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


@contextmanager
def serve(*models: str) -> Generator[str]:
    """The address of a server of these models."""
    command = [sys.executable, "-c", "from vitrail.cli import main; main()", "serve", *models]
    server = subprocess.Popen([*command, "--port", "0", "--drain", "0", "--quiet"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()


def open_folder(page: Page) -> None:
    """A folder of the bundled photos, some of them under a wrong name."""
    with TemporaryDirectory() as name:
        for folder, photo in (("Egyptian_cat", "cat"), ("tabby", "cat"), ("espresso", "coffee"), ("cup", "coffee")):
            (Path(name) / folder).mkdir()
            shutil.copy(PHOTO_FOLDER / f"{photo}.jpg", Path(name) / folder / f"{photo}-{folder}.jpg")
        page.set_input_files("#folder", name)
        page.wait_for_selector("#listing-name:has-text('4 photos, least')")
        page.locator("#listed .wrong").first.click()
        page.wait_for_selector(".truth:not([hidden])")


def hide_brightest(page: Page) -> None:
    page.click(".brightest")
    page.wait_for_selector(".class .before")


def point_at_word(page: Page) -> None:
    page.hover(".matrix tbody tr:nth-child(4) td:nth-child(4)")


def scroll_to_figure(page: Page) -> None:
    page.locator("#figure").scroll_into_view_if_needed()
    page.evaluate("() => window.scrollTo(0, document.querySelector('#controls').offsetTop - 8)")


def list_views(
    model: str, other: str | None, captioner: str | None
) -> dict[str, tuple[str, Callable[[Page], None] | None]]:
    """The address of each view, and what is done there."""
    start = f"#model={model}&photo=example:coffee"
    views: dict[str, tuple[str, Callable[[Page], None] | None]] = {
        "first": (f"#model={model}", None),
        "attention": (f"{start}&view=attention&layer=6&patch=4,6", None),
        "hidden": (start, hide_brightest),
        "folder": (start, open_folder),
        "translation": ("#model=transformer_tatoeba&text=Ich+habe+viel+zu+tun.", point_at_word),
    }
    views |= {
        view: (f"{start}&view={view}", scroll_to_figure)
        for view in ("rollout", "distance", "positions", "norms", "lens")
    }
    if other is not None:
        views["two"] = (f"#model={model}&with={other}&photo=example:cat&view=attention&layer=6&patch=5,7", None)
    if captioner is not None:
        views["caption"] = (f"#model={captioner}&photo=example:cat", None)
    return views


def take(
    browser: Browser, address: str, size: tuple[int, int], scheme: Scheme, act: Callable[[Page], None] | None
) -> bytes:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.add_init_script("localStorage.setItem('vitrail-tour', '1')")
    page.goto(address)
    page.wait_for_selector(READY)
    if act is not None:
        act(page)
    page.wait_for_timeout(1500)  # the check, if the map has changed
    page.wait_for_selector(READY)
    found = page.screenshot(full_page=size == PHONE)
    context.close()
    return found


def save(png: bytes, path: Path) -> None:
    """With few colors: a fourth of the bytes."""
    with Image.open(BytesIO(png)) as image:
        image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


SHOWN: dict[str, tuple[tuple[int, int], Scheme]] = {  # in the docs
    "first": (DESKTOP, "light"),
    "attention": (DESKTOP, "dark"),
    "distance": (DESKTOP, "light"),
    "folder": (DESKTOP, "light"),
    "two": (DESKTOP, "light"),
    "translation": (DESKTOP, "light"),
}


def main(
    model: str = "vit=vit_tiny_patch16_224",
    other: str | None = "deit=deit_tiny_patch16_224",
    captioner: str | None = None,
    out: Path | None = None,
) -> None:
    models = [
        model,
        *([other] if other else []),
        "transformer_tatoeba",
        *([f"captioner={captioner}"] if captioner else []),
    ]
    views = list_views(model.partition("=")[0], other and other.partition("=")[0], captioner and "captioner")
    with serve(*models) as address, sync_playwright() as driver:
        program: Any = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (fragment, act) in views.items():
            if out is None and name in SHOWN:
                size, scheme = SHOWN[name]
                save(take(browser, address + fragment, size, scheme, act), FOLDER / f"explorer-{name}.png")
            if out is None:
                continue
            for width, size in (("desktop", DESKTOP), ("phone", PHONE)):
                for scheme in SCHEMES:
                    save(take(browser, address + fragment, size, scheme, act), out / f"{name}-{width}-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    run(main)
