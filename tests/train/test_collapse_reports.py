"""A run whose features collapse is reported once, in every front end, and can stop there."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.toy_datasets import write_image
from support.toy_task import RECIPE, SelfDistillation, ToySettings, make_backbone, make_data
from torch import Tensor

import vitrail
from vitrail import cli, tasks
from vitrail.base.errors import VitrailError
from vitrail.data.batch import Batch
from vitrail.data.images.datasets import DatasetSplits
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_task import build_image_task
from vitrail.tasks.metric import COLLAPSED, SPREAD_SIGN, CollapsedError, CollapseWarning, CollapseWatch
from vitrail.tasks.task import TaskKind
from vitrail.train.callbacks import TerminalCallback
from vitrail.train.plots import draw_training_curves
from vitrail.train.run_list import read_run_summary
from vitrail.train.trainer import Trainer


class CollapsingTask(SelfDistillation):
    """Its features are all the same from some step on."""

    collapse_signs = (SPREAD_SIGN,)
    first = 2  # step of the collapse

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = super().forward(batch, clock)
        return loss, {**metrics, "spread": torch.tensor(0.5 if clock.step < self.first else 0.01)}


class HealthyTask(CollapsingTask):
    first = 10**6


def fit(
    task: type[CollapsingTask], data: DatasetSplits, recipe: Recipe, run: Path | None = None, **options: Any
) -> Any:
    return vitrail.fit(task(make_backbone()), data, recipe, run=run, **options)


def catch_collapses(train: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in caught if issubclass(each.category, CollapseWarning)]


def test_watch_needs_three_windows_in_a_row_after_the_warm_up() -> None:
    watch = CollapseWatch((SPREAD_SIGN,), warmup_steps=2)
    values = (0.01, 0.01, 0.01, 0.01, 0.9, 0.04, 0.03, 0.02, 0.01)  # two windows, then one that does not show it
    records = [{"step": step, "loss": 1.0, "spread": spread} for step, spread in enumerate(values, start=1)]
    found = [watch.find_collapse(record) for record in (*records, {"step": 9, "val_loss": 1.0})]
    assert [place for place, message in enumerate(found) if message] == [7]
    for text in ("at step 8", "spread is 0.02, less than 0.05 in 3 log windows", "lower `lr`"):
        assert text in (found[7] or "")


def test_windows_of_few_steps_must_cover_those_of_the_sign() -> None:
    watch = CollapseWatch((replace(SPREAD_SIGN, steps=50),))
    records = [{"step": step, "loss": 1.0, "spread": 0.01 if step > 4 else 0.9} for step in range(2, 80, 2)]
    (found,) = filter(None, map(watch.find_collapse, records))
    assert "at step 54: spread is 0.01, less than 0.05 in 25 log windows" in found


def test_a_collapse_is_reported_once_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPE.with_settings({"save_every": 1, "epochs": 4})

    def stop(self: Trainer, batches: Iterator[Batch]) -> set[str]:
        if self.steps_done == 8:
            raise VitrailError("enough")
        return real_step(self, batches)

    def train() -> None:
        with pytest.raises(VitrailError, match="enough"):
            fit(CollapsingTask, make_data(), recipe, tmp_path / "run")

    real_step = Trainer.step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        (found,) = catch_collapses(train)
    assert "the run has collapsed at step 5: spread is 0.01" in found
    assert not catch_collapses(lambda: fit(CollapsingTask, make_data(), recipe, tmp_path / "run"))
    summary = read_run_summary(tmp_path / "run")
    assert [row["step"] for row in summary.records if COLLAPSED in row] == [5]
    assert summary.state.endswith(", collapsed at step 5")
    spread = draw_training_curves({"run": summary.records}, (), ()).axes[2]
    assert (spread.get_title("left"), [text.get_text() for text in spread.texts]) == ("spread", [" collapsed"])
    assert not catch_collapses(lambda: fit(HealthyTask, make_data(), recipe))


def test_batches_of_few_images_show_no_collapse() -> None:
    assert not catch_collapses(lambda: fit(CollapsingTask, make_data(), RECIPE.with_settings({"batch": 3}), steps=9))


def test_a_short_run_reports_its_collapse(tmp_path: Path) -> None:
    """60 steps of an epoch of 600, half of them warm-up: the windows are shorter than those of a long run."""
    recipe, data = RECIPE.with_settings({"warmup": 1}), replace(make_data(4800), val=make_data().val)
    (found,) = catch_collapses(lambda: fit(CollapsingTask, data, recipe, tmp_path / "run", steps=60))
    assert "at step 45:" in found


def test_stop_on_collapse_keeps_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPE.with_settings({"stop_on_collapse": True})
    with pytest.raises(CollapsedError, match=r"collapsed at step 5: .*; the last good checkpoint is .*step-00000005"):
        fit(CollapsingTask, make_data(), recipe, tmp_path / "run")

    def fail(*_: object) -> None:
        pytest.fail("a collapsed run was trained further")

    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(CollapsedError, match="collapsed at step 5"):
        fit(CollapsingTask, make_data(), recipe, tmp_path / "run")


def test_the_warning_is_printed_above_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    console = Console(file=terminal, force_terminal=True, width=400, soft_wrap=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", cli.print_warning)
        fit(CollapsingTask, make_data(), RECIPE, callbacks=TerminalCallback(console))
    lines = [line for line in terminal.getvalue().splitlines() if "vitrail: warning" in line]
    assert len(lines) == 1
    assert "lower --lr" in lines[0]
    assert "9/9" in terminal.getvalue()


def test_command_line_stops_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = TaskKind(
        name="toy_task",
        settings=ToySettings,
        build=lambda request, context: build_image_task(request, context, CollapsingTask),
        needs_classes=False,
    )
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, "toy_task"))
    monkeypatch.setitem(sys.modules, "vitrail.tasks.toy_task", SimpleNamespace(TASK=kind))
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        write_image(tmp_path / "images" / f"{number}.png", number)
    text = "fields: {image_size: 8, patch_size: 4, width: 12, depth: 1, heads: 2}\ntask: {name: toy_task}\nbatch: 4\n"
    Path("toy.yaml").write_text(f"model: vit_tiny_patch16_224\n{text}epochs: 3\n")
    words = ["train", "--recipe", "toy.yaml", "--data", "images", "--stop-on-collapse", "--out", "run"]
    monkeypatch.setattr(sys, "argv", ["vitrail", *words])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert error.startswith("vitrail: the run has collapsed at step 5")
    assert "run/checkpoints/step-00000005" in error
