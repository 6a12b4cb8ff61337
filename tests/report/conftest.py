"""A browser for the tests of pages."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.chromium import open_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """One for each test file."""
    with open_chromium() as opened:
        yield opened
