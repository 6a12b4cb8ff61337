"""Progress bars appear in a notebook and on a terminal, and nowhere else by themselves."""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.fake_notebook import FakeNotebook

from vitrail.base import progress
from vitrail.base.progress import format_html_bar, in_notebook, is_watched, progress_bar, track_progress
from vitrail.cli.output.progress import progress_bar as command_progress_bar


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_SECONDS", 0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> FakeNotebook:
    return FakeNotebook.install(monkeypatch)


def test_a_script_without_a_terminal_shows_nothing(at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_watched()
    with progress_bar(3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_a_bar_can_be_requested(at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(3, "images", show=True) as advance:
        advance(3)
    out, err = capsys.readouterr()
    assert (out, "images" in err, "3/3" in err) == ("", True, True)


def test_a_terminal_shows_a_bar_unless_it_is_refused(
    at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for show, expected in ((None, True), (False, False)):
        with progress_bar(3, "images", show=show) as advance:
            advance(2)
        assert ("2/3" in capsys.readouterr().err) is expected


def test_short_work_shows_no_bar(notebook: FakeNotebook) -> None:
    with progress_bar(3) as advance:
        advance(3)
    assert notebook.shown == []


def test_a_notebook_shows_html_which_is_removed_at_the_end(at_once: None, notebook: FakeNotebook) -> None:
    assert in_notebook()
    with progress_bar(4, "<images>") as advance:
        advance(1)
        advance(3)
    assert 'value="1" max="4"' in notebook.shown[1]
    assert "4/4" in notebook.shown[2]
    assert "&lt;images&gt;" in notebook.shown[1]
    assert (notebook.shown[0], notebook.shown[-1]) == ("", "")


def test_ipython_in_a_terminal_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("IPython")
    module.get_ipython = SimpleNamespace
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert not in_notebook()


def test_a_function_of_your_own_replaces_the_bar(at_once: None, notebook: FakeNotebook) -> None:
    seen = list[int]()
    with track_progress(seen.append, 3) as advance:
        advance(2)
    assert (seen, notebook.shown) == ([2], [])


def test_an_unknown_total_has_a_bar_without_a_value() -> None:
    assert "<progress style" in format_html_bar("decoding", 5, None)
    assert "0:01:05 left" in format_html_bar("", 5, 10, seconds_left=65)


def test_without_a_terminal_a_command_says_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with command_progress_bar(100, "drawing") as advance:
        advance(1)
    assert capsys.readouterr().err == "", "it was fast"
    monkeypatch.setattr(progress, "ANNOUNCE_SECONDS", 0)
    with command_progress_bar(100, "drawing") as advance:
        wait_for_timers()
        advance(1)
    assert capsys.readouterr().err == "drawing …\n"


def wait_for_timers() -> None:
    for each in threading.enumerate():
        if isinstance(each, threading.Timer):
            each.join(60)
