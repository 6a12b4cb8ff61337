"""Run commands of the command line in this process."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support.saved_models import write_model_folder
from support.toy_datasets import write_image

from vitrail.base import progress
from vitrail.cli import main


class CommandResult(NamedTuple):
    code: int | str | None
    out: str
    err: str


@pytest.fixture
def vitrail_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Run `vitrail WORDS…` and return its result; changes to this process are undone after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(progress, "ANNOUNCE_SECONDS", 3600.0)  # what is printed does not depend on the machine

    def run(*words: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Cyclopts application invoked without tokens")  # they are in sys.argv
            with pytest.raises(SystemExit) as ended:
                main()
        captured = capsys.readouterr()
        return CommandResult(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the model is run: errors must be raised before."""

    def fail(*_: object) -> None:
        pytest.fail("the model was run")

    monkeypatch.setattr("vitrail.inspection.explain.explainer.Explainer.compute_maps", fail)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos in the current folder, two of them with the same name."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a/1.png", "a/2.png", "b/1.png", "b/c/3.jpg")):
        write_image(tmp_path / "photos" / name, number)
    return Path("photos")
