"""Servers of toy models, one per file of tests."""

from collections.abc import Generator

import pytest
from support.server_process import Server, run_server
from support.toy_served import save_digits


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Serves `digits`, which answers at once."""
    folder = tmp_path_factory.mktemp("served")
    with run_server(save_digits(folder / "digits"), "--drain", 0, log=folder / "log") as running:
        yield running
