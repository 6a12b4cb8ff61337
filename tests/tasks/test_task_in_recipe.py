"""A task as one file and one line: it is trained by a recipe that names it, and its settings are checked."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from support import toy_task
from support.toy_datasets import write_image
from test_train_fit import assert_same, read_checkpoint_and_log

import vitrail
from vitrail import tasks
from vitrail.base.errors import ConfigError
from vitrail.cli import build_app
from vitrail.train.run_folder import RunFolder


def run_command(*words: str) -> None:
    build_app()(words, exit_on_error=False, result_action="return_value")


@pytest.fixture
def toy_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """The toy task as one file and one line; the command that trains it by a recipe, in two epochs."""
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, "toy_task"))
    monkeypatch.setitem(sys.modules, "vitrail.tasks.toy_task", toy_task)
    (tmp_path / "toy.yaml").write_text(
        "model: vit_tiny_patch16_224\n"
        "fields: {image_size: 8, patch_size: 4, width: 12, depth: 1, heads: 2}\n"
        "batch: 4\nepochs: 2\nsave_every: 1\nkeep_best: true\n"
        "task: {name: toy_task, outputs: 5, momentum: {start: 0.8, end: 1}}\n"
        "schedules: {weight_decay: {start: 0.04, end: 0.4}}\n"
    )
    for number in range(10):
        write_image(tmp_path / "images" / f"{number}.png", number)
    return "train", "--recipe", str(tmp_path / "toy.yaml"), "--data", str(tmp_path / "images"), "--workers", "0"


def test_task_is_one_file_and_one_line(
    toy_file: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains on images without classes, resumes and saves by its recipe, as any other."""
    run = RunFolder(tmp_path / "run")
    run_command(*toy_file, "--out", str(run.folder))
    printed = capsys.readouterr().out
    assert "task   toy_task: outputs 5, momentum 0.8 to 1\n" in printed
    assert "weight_decay 0.04 to 0.4" in printed
    tensors, _ = read_checkpoint_and_log(run)
    assert tensors["model/task.last.weight"].shape == (5, 5)
    recorded = run.load_plan()
    assert recorded["task"]["name"] == "toy_task"
    assert [each["name"] for each in recorded["task"]["metrics"]] == ["agreement", "loss"]
    for part in ("model", "best"):
        assert (run.folder / part / "model.safetensors").exists()
    stopped = RunFolder(tmp_path / "stopped")
    shutil.copytree(run.folder, stopped.folder)
    stopped.list_checkpoints()[-1].unlink()
    shutil.rmtree(stopped.folder / "model")
    run_command("train", "--resume", str(stopped.folder))
    assert_same(run, stopped)
    model = vitrail.load(stopped.folder / "model")
    assert model.config.classes == 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[f"model/task.teacher.0.{name}"]), name


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("{name: toy_tusk}", "unknown task 'toy_tusk'; did you mean 'toy_task'"),
        ("{name: 5}", "unknown task 5"),
        ("{name: toy_task, momentun: 0.9}", "unknown setting of the task toy_task 'momentun'; did you mean 'momentum'"),
        ("{name: toy_task, outputs: 0}", "outputs is 0; expected more than 0"),
        ("{name: toy_task, outputs: many}", "outputs is 'many'; expected a whole number"),
        ("{name: toy_task, momentum: {end: 1}}", "the schedule of momentum"),
        ("{name: toy_task, momentum: {start: 1, shape: round}}", "shape of a schedule is 'round'"),
        ("{name: classification, momentum: 0.9}", "`task` sets momentum, but classification has no settings"),
        ("{name: distillation, tempreture: 2}", "did you mean 'temperature'"),
        ("{tempreture: 2}", "`task` sets tempreture"),
        ("toy_task", "task is 'toy_task'; expected a mapping"),
    ],
)
def test_unknown_tasks_and_settings_are_one_line_errors(
    task: str, message: str, toy_file: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = tmp_path / "toy.yaml"
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("task:")]
    recipe.write_text("\n".join((*lines, f"task: {task}")))
    with pytest.raises(ConfigError, match=message) as caught:
        run_command(*toy_file, "--out", str(tmp_path / "run"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
