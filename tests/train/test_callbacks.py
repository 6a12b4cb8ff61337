from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.fake_notebook import FakeNotebook

from vitrail.base import progress
from vitrail.tasks.classification import Classification
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.train.callbacks import (
    CallbackList,
    NotebookCallback,
    TensorBoardCallback,
    TerminalCallback,
    TrainingStart,
    format_record,
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


KNN = (Metric(name="knn_top1", label="k-NN top-1", is_share=True), LOSS_METRIC)
PERPLEXITY = (Metric(name="perplexity", label="perplexity", higher_is_better=False),)


@pytest.mark.parametrize(
    ("record", "metrics", "words"),
    [
        ({"val_knn_top1": 0.5, "val_loss": 2.0}, KNN, "validation: k-NN top-1 50.00%  loss 2.0000"),
        ({"val_knn_top1": 0.5}, KNN, "validation: k-NN top-1 50.00%"),
        ({"val_perplexity": 1234.56, "val_loss": 2.0}, PERPLEXITY, "validation: perplexity 1235  loss 2.0000"),
        ({"val_loss": 2.0, "val_other": 3.0}, (LOSS_METRIC,), "validation: loss 2.0000"),
        ({"val_some_score": 0.25}, PERPLEXITY, "validation: some score 0.25"),
        (
            {
                "loss": 2.0,
                "teacher_entropy": 1.23456,
                "masked": 0.75,
                "lr": 0.1,
                "tokens_per_second": 4e6,
                "seconds": 1,
            },
            KNN,
            "loss 2.0000  teacher entropy 1.235  masked 75.00%  lr 1.00e-01  4000000 tokens/s",
        ),
    ],
)
def test_lines_of_other_tasks(record: dict[str, float], metrics: tuple[Metric, ...], words: str) -> None:
    start = TrainingStart(steps=100, steps_per_epoch=50, metrics=metrics, unit="tokens", shares=("masked",))
    assert format_record({"step": 1, "epoch": 0.5, **record}, start) == f"epoch 0.50  step 1  {words}"


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


def test_a_script_without_a_terminal_prints_lines_unless_they_are_turned_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert open_progress_callback(False) is None
    for show in (None, True):
        callback = open_progress_callback(show)
        assert isinstance(callback, TerminalCallback)
        callback.on_start(START)
        callback.on_log(VALIDATION)
        callback.on_finish()
        assert capsys.readouterr() == ("", "epoch 1.00  step 50  validation: top-1 71.25%  loss 0.9000\n")


def test_tensorboard_receives_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = CallbackList([TensorBoardCallback()])
    callback.on_start(TrainingStart(steps=100, steps_per_epoch=50, folder=tmp_path))
    callback.on_step(1)
    callback.on_log(STEP)
    callback.on_log(VALIDATION)
    callback.on_log({"step": 60, "tokens_per_second": 4e6, "teacher_entropy": 0.5})
    callback.on_log({"step": 60, "val_knn_top1": 0.25})
    callback.on_finish()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Scalars("training/loss")[0].value == 1.5
    assert found.Scalars("validation/top1")[0].step == 50
    assert found.Scalars("training/tokens_per_second")[0].value == 4e6
    assert found.Scalars("training/teacher_entropy")[0].step == 60
    assert found.Scalars("validation/knn_top1")[0].value == 0.25


def test_without_a_terminal_a_long_last_evaluation_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "ANNOUNCE_SECONDS", 0)
    callback = TerminalCallback(console=Console(file=StringIO()))
    callback.on_start(START)
    for step in (START.steps - 1, START.steps):
        assert callback.last_evaluation is None
        callback.on_step(step)
    assert callback.last_evaluation is not None
    callback.last_evaluation.timer.join(60)
    callback.on_finish()
    assert capsys.readouterr().err == "evaluating after the last step …\n"
