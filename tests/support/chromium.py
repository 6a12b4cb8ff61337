"""Headless Chromium for tests of pages; they skip by name without it."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.browser_pages import CHROMIUM_ARGUMENTS

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextmanager
def open_chromium() -> "Generator[Browser]":
    """While it is open, an event loop runs in this thread."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `test`")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs Chromium: make browser")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGUMENTS))
        yield opened
        opened.close()
