"""Commands as a user gives them, in this process."""

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest

from vitrail.cli import main


class Said(NamedTuple):
    code: int | str | None
    out: str
    err: str


@pytest.fixture
def vitrail_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs `vitrail WORDS…` to its end; what it changes in this process is set back after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Cyclopts application invoked without tokens")  # they are in sys.argv
            with pytest.raises(SystemExit) as ended:
                main()
        seen = capsys.readouterr()
        return Said(ended.value.code, seen.out, seen.err)

    return run


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be done in the end is refused before the model is asked."""

    def ask(*_: object) -> None:
        pytest.fail("the model was asked")

    monkeypatch.setattr("vitrail.inspection.explain.Explainer.maps", ask)
