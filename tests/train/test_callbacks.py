from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.fake_notebook import FakeNotebook

from vitrail import progress
from vitrail.tasks.classification import Classification
from vitrail.train.callbacks import (
    CallbackList,
    NotebookCallback,
    TensorBoardCallback,
    TerminalCallback,
    TrainingStart,
    open_progress_callback,
)

STEP = {"step": 20, "epoch": 0.4, "loss": 1.5, "accuracy": 0.25, "lr": 1e-3, "images_per_second": 812.4, "seconds": 3.0}
VALIDATION = {"step": 50, "epoch": 1.0, "val_loss": 0.9, "val_top1": 0.7125, "val_top5": 0.98, "seconds": 5.0}
START = TrainingStart(steps=100, steps_per_epoch=50, metrics=Classification.metrics)


def capture_terminal(*, terminal: bool, every: float = 0.0) -> str:
    out = StringIO()
    callback = TerminalCallback(
        Console(file=out, force_terminal=terminal, width=120, highlight=False), seconds_between_lines=every
    )
    callback.on_start(START)
    callback.on_step(20)
    callback.on_log(STEP)
    callback.on_log(VALIDATION)
    callback.on_finish()
    return out.getvalue()


def test_without_a_terminal_lines_are_printed() -> None:
    lines = capture_terminal(terminal=False).splitlines()
    assert lines == [
        "epoch 0.40  step 20  loss 1.5000  accuracy 25.00%  lr 1.00e-03  812 img/s",
        "epoch 1.00  step 50  validation: top-1 71.25%  loss 0.9000",
    ]
    assert len(capture_terminal(terminal=False, every=99).splitlines()) == 1, "few lines"


def test_in_a_terminal_a_progress_bar_is_shown() -> None:
    out = capture_terminal(terminal=True)
    assert "\x1b[" in out
    for word in ("epoch 0.40", "20/100", "loss 1.5000", "812 img/s", "top-1 71.25%", "left"):
        assert word in out


def test_a_notebook_shows_a_bar_and_then_the_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = FakeNotebook.install(monkeypatch)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)
    callback = open_progress_callback(None)
    assert isinstance(callback, NotebookCallback)
    callback.on_start(START)
    callback.on_step(20)
    callback.on_log(STEP)
    callback.on_log(VALIDATION)
    for word in ('value="20" max="100"', "loss 1.5000", "epoch 0.40", "top-1 71.25%"):
        assert word in notebook.shown[-1]
    callback.on_finish()
    assert "top-1 71.25%" in notebook.shown[-1]
    assert "<progress" not in notebook.shown[-1]


def test_a_script_without_a_terminal_has_no_progress_unless_it_is_requested() -> None:
    assert open_progress_callback(None) is None
    assert open_progress_callback(False) is None
    assert isinstance(open_progress_callback(True), TerminalCallback)


def test_tensorboard_receives_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = CallbackList([TensorBoardCallback()])
    callback.on_start(TrainingStart(steps=100, steps_per_epoch=50, folder=tmp_path))
    callback.on_step(1)
    callback.on_log(STEP)
    callback.on_log(VALIDATION)
    callback.on_finish()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Scalars("training/loss")[0].value == 1.5
    assert found.Scalars("validation/top1")[0].step == 50
