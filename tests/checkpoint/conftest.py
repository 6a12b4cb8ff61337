"""A hub on this machine instead of the Hugging Face hub."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.fake_hub import FakeHub, run_hub_for_this_process


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeHub]:
    with run_hub_for_this_process(tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
