"""The examples in the docstrings of the public names run, in one process and in an empty folder."""

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import vitrail
from vitrail.inspection.explain.explanation import Explanation
from vitrail.opening import Opened

RETURNED = {"Opened": Opened, "Explanation": Explanation}  # by public functions
WITHOUT_EXAMPLE = ("VitrailError", "CheckpointError", "ConfigError", "DataError")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def list_public_objects() -> dict[str, Any]:
    public = {name: getattr(vitrail, name) for name in vitrail.__all__}
    return {name: each for name, each in public.items() if not isinstance(each, ModuleType)} | RETURNED


def list_docstrings() -> Iterator[tuple[str, str]]:
    for name, each in list_public_objects().items():
        yield name, inspect.getdoc(each) or ""
        for member, value in vars(each).items() if inspect.isclass(each) else ():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                yield f"{name}.{member}", inspect.getdoc(value) or ""


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    docstrings = dict(list_docstrings())
    for name in list_public_objects():
        text = docstrings[name]
        assert text, name
        assert ">>> " in text or name in WITHOUT_EXAMPLE, name
        assert len(text) < 1700, f"{name}: keep it short"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS)
    for name, text in list_docstrings():
        runner.run(parser.get_doctest(text, {"vitrail": vitrail}, name, None, 0))
    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out
    assert runner.tries > 30
