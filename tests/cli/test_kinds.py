"""Every kind is found by its name; a new one is one file and one line."""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.toy_kind import LineRows, LineSource, LineTask, save_line

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.kinds import KINDS, find_kind
from vitrail.predict.job import Job
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe

Run = Callable[..., Any]


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model of the toy kind, trained by the loop."""
    monkeypatch.setitem(KINDS, "line", "support.toy_kind")  # the one line
    recipe = Recipe(
        loop=LoopSettings(epochs=200, batch=8, eval_every=0),
        optimization=OptimizationSettings(lr=0.1, weight_decay=0.0, warmup=0),
    )
    trained: Any = vitrail.fit(LineTask(), LineSource(), recipe, device="cpu", threads=1, progress=False).model
    return save_line(trained, tmp_path / "line")


def test_a_toy_kind_is_trained_opened_and_evaluated(line: Path, vitrail_: Run, tmp_path: Path) -> None:
    opened = vitrail.open_model(line)
    assert (opened.kind, opened.model.weight.item()) == ("line", pytest.approx(3, abs=0.05))
    found = json.loads(vitrail_("eval", line, "--json").out)
    assert found["error"] < 0.05
    assert vitrail_("eval", line, "-o", tmp_path / "scores.csv").code == 0
    assert (tmp_path / "scores.csv").read_text().startswith("error\n")
    with pytest.raises(ConfigError, match="LineTask trains on a line; expected a LineSource, not 'fashion'"):
        vitrail.fit(LineTask(), "fashion", device="cpu")


def test_predictions_of_a_toy_kind_are_resumed(line: Path, vitrail_: Run, tmp_path: Path) -> None:
    numbers, out = [str(number) for number in range(6)], tmp_path / "rows.csv"

    class Stopped(LineRows):
        def open(self, items: Any, summary: Any, partial: Any, on_note: Any) -> Any:
            opened = super().open(items, summary, partial, on_note)
            iterate = opened.iterate

            def stop(*given: Any) -> Iterator[Any]:
                for count, row in enumerate(iterate(*given)):
                    if count == 3:
                        raise KeyboardInterrupt
                    yield row

            return type(opened)(iterate=stop, describe=opened.describe, open_sink=opened.open_sink)

    with pytest.raises(KeyboardInterrupt):
        Job(rows=Stopped(model=str(line), inputs=numbers), out=out).run()
    assert not out.exists()
    assert vitrail_("predict", line, *numbers, "-o", out, "--resume").code == 0
    assert [row.split(",")[0] for row in out.read_text().splitlines()] == ["x", *numbers]


def test_what_a_toy_kind_does_not_have_is_one_line(line: Path, vitrail_: Run) -> None:
    for words in (("explain", line, "1"), ("export", line, "out"), ("report", line)):
        result = vitrail_(*words)
        assert (result.code, result.err.count("\n")) == (2, 1), words
        assert "line reads numbers; expected a model that reads images: use vitrail predict" in result.err
    assert "--beam does not apply, since" in vitrail_("eval", line, "--beam", "2").err


def test_unknown_kinds_and_missing_packages_are_one_line(line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "line", "package_that_is_missing.line")
    with pytest.raises(ConfigError, match="line is of the kind 'line', which needs package_that_is_missing; install"):
        vitrail.open_model(line)
    monkeypatch.delitem(KINDS, "line")
    with pytest.raises(CheckpointError, match="kind 'line', which this vitrail does not know; expected one of image, "):
        vitrail.open_model(line)


@pytest.mark.parametrize("name", KINDS)
def test_the_commands_of_a_kind_exist(name: str) -> None:
    kind = find_kind(name)
    assert kind.name == name
    for place in kind.commands.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(module), function))
