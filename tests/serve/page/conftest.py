"""One server and one browser for all tests of the page."""

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
from support.chromium import open_chromium
from support.server_process import run_server
from support.toy_captions import write_toy_captioner

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> "Generator[Browser]":
    with open_chromium() as opened:
        yield opened


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A server of two models of photos, a translator and a captioner."""
    folder = tmp_path_factory.mktemp("explorer")
    models = "cct_cifar10", "vit_fashion", "transformer_tatoeba", write_toy_captioner(folder / "captioner")
    with run_server(*models, "--drain", 0, log=folder / "log") as running:
        yield running.address
