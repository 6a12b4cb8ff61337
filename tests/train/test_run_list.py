"""Run folders, finished, unfinished and damaged: each has its state, and none raises an error."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vitrail.base.errors import ConfigError, DataError
from vitrail.checkpoint.run_files import FinishedRun, find_finished_run
from vitrail.models.catalog.families import find_preset
from vitrail.tasks.metric import Metric
from vitrail.train import run_folder
from vitrail.train.run_list import RecordedTask, make_run_table, read_run_summaries, read_run_summary

PLAN: dict[str, Any] = {
    "vitrail": "0.1.0",
    "request": {"data": "photos", "val_share": 0.25},
    "data": {"name": "photos", "train": 8, "val": 4},
    "model": {"name": "ViT-Ti/16", "family": "vit", "config": {}},
    "recipe": {"name": "scratch", "seed": 7},
    "steps": 4,
}
LOG: list[dict[str, float]] = [
    {"step": 1, "epoch": 0.5, "loss": 2.5, "seconds": 0.4},
    {"step": 2, "epoch": 1.0, "val_loss": 2.0, "val_top1": 0.75, "val_top5": 1.0, "seconds": 1.0},
    {"step": 3, "epoch": 1.5, "loss": 1.5, "seconds": 1.4},
    {"step": 4, "epoch": 2.0, "val_loss": 1.9, "val_top1": 0.5, "val_top5": 1.0, "seconds": 2.0},
]


def make_run(folder: Path, *, rows: int = 4, finished: bool = True) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(PLAN))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOG[:rows]))
    if finished:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
    return folder


def test_finished_run(tmp_path: Path) -> None:
    run = read_run_summary(make_run(tmp_path / "one"))
    assert (run.name, run.state, run.step, run.steps) == ("one", "finished", 4, 4)
    assert (run.model, run.data, run.recipe) == ("ViT-Ti/16", "photos", "scratch")
    assert (
        run.best_value("val_top1"),
        run.last_value("val_top1"),
        run.last_value("loss"),
        run.last_value("seconds"),
    ) == (0.75, 0.5, 1.5, 2.0)
    assert [dict(row) for row in run.records] == LOG
    data = json.loads(json.dumps(run.to_json(), allow_nan=False))
    assert (data["best_val_top1"], data["val_top1"], data["state"]) == (0.75, 0.5, "finished")


TOY_TASK: dict[str, Any] = {
    "name": "toy",
    "unit": "tokens",
    "metrics": [
        {"name": "perplexity", "label": "perplexity", "higher_is_better": False, "is_share": False},
        {"name": "loss", "label": "loss", "higher_is_better": False},
    ],
}


def make_toy_run(folder: Path, task: Any = TOY_TASK) -> Path:
    """A run of a task whose metric is better if it is lower."""
    make_run(folder)
    (folder / "run.json").write_text(json.dumps({**PLAN, "task": task}))
    rows = [
        {"step": n, "epoch": n / 2, "val_perplexity": value, "val_loss": n} for n, value in ((1, 33.33333), (2, 40))
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_run_of_another_task_has_its_own_metric(tmp_path: Path) -> None:
    run = read_run_summary(make_toy_run(tmp_path / "toy"))
    assert (run.task.name, run.task.unit, run.task.metric.label) == ("toy", "tokens", "perplexity")
    assert (run.last_metric, run.best_metric, run.best_value("val_loss")) == (40, 33.33333, 1)
    data = run.to_json()
    assert (data["task"], data["unit"], data["metric"]["name"]) == ("toy", "tokens", "perplexity")
    assert (data["best_val_perplexity"], data["val_perplexity"], data["val_loss"]) == (33.33333, 40, 2)
    assert not any("top" in name or "accuracy" in name for name in data)
    old = read_run_summary(make_run(tmp_path / "old"))
    assert old.task == RecordedTask()
    assert (old.task.metric.name, "task" in old.to_json()) == ("top1", False)


def test_rows_of_a_table_name_their_metric_if_there_are_other_tasks(tmp_path: Path) -> None:
    old, toy = read_run_summary(make_run(tmp_path / "old")), read_run_summary(make_toy_run(tmp_path / "toy"))
    table = make_run_table([old, toy])
    assert [each.name for each in table.columns[5:8]] == ["metric", "last", "best"]
    assert [row[5:9] for row in table.format_cells()] == [
        ["top-1", "50.00%", "75.00%", "1.9000"],
        ["perplexity", "40", "33.33", "2.0000"],
    ]
    assert [record["best"] for record in table.list_records()] == [0.75, 33.33333]
    assert table.alignments == "llllrlrrrrrl"
    assert "metric" not in [each.name for each in make_run_table([old]).columns]


@pytest.mark.parametrize(
    "task", [None, 3, {}, {"metrics": None}, {"metrics": [3, {"name": 4, "label": "x"}]}, {"metrics": {"name": "x"}}]
)
def test_damaged_task_does_not_raise(tmp_path: Path, task: Any) -> None:
    run = read_run_summary(make_toy_run(tmp_path / "toy", task))
    assert (run.state, run.task, run.last_metric) == ("finished", RecordedTask(), None)


def test_odd_fields_of_a_recorded_metric_take_their_defaults(tmp_path: Path) -> None:
    metrics = [{"name": "x", "label": "x\x1b", "higher_is_better": "no", "is_share": 1, "later": 3}]
    run = read_run_summary(make_toy_run(tmp_path / "toy", {"unit": 3, "metrics": metrics}))
    assert (run.task.unit, run.task.metrics) == ("images", (Metric(name="x", label="x\x1b"),))
    assert make_run_table([run]).format_cells()[0][5] == r"x\x1b"


VIT_TINY: dict[str, Any] = json.loads(json.dumps(asdict(find_preset("vit_tiny_patch16_224")[1])))


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({**VIT_TINY, "classes": 2, "channels": 1}, "vit_tiny_patch16_224"),
        ({**VIT_TINY, "image_size": [224, 224]}, "vit_tiny_patch16_224"),
        ({**VIT_TINY, "dropout": 0.1, "pool": "mean"}, "vit_tiny_patch16_224, pool mean, dropout 0.1"),
        ({**VIT_TINY, "width": 64, "depth": 4}, "vit, width 64, depth 4"),
        ({}, "vit_tiny_patch16_224"),
        (None, "vit_tiny_patch16_224"),
    ],
)
def test_models_that_started_from_a_checkpoint_have_their_preset_s_name(
    tmp_path: Path, config: dict[str, Any] | None, model: str
) -> None:
    folder = make_run(tmp_path / "one")
    (folder / "run.json").write_text(json.dumps({"model": {"name": "vit", "family": "vit", "config": config}}))
    found = read_run_summary(folder).model
    assert found == model or (not config and found.startswith("vit_"))


def test_changed_fields_and_teachers_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    recipe = {"name": "r", "fields": {"depth": 6, "classes": 3}}
    plan = {**PLAN, "recipe": recipe, "teacher": {"name": "timm:regnety_160"}, "init": "/data/runs/first/model"}
    (folder / "run.json").write_text(json.dumps(plan))
    run = read_run_summary(folder)
    assert (run.model, run.teacher, run.init) == ("ViT-Ti/16, depth 6", "timm:regnety_160", "first")
    (folder / "run.json").write_text(json.dumps({"model": {"name": "/code/own.py:small", "family": "own"}}))
    assert read_run_summary(folder).model == "own.py:small"


def test_stopped_runs(tmp_path: Path) -> None:
    assert read_run_summary(make_run(tmp_path / "killed", rows=3, finished=False)).state == "stopped at step 3"
    started = make_run(tmp_path / "started", rows=0, finished=False)
    assert read_run_summary(started).state == "stopped at step 0"
    (started / "log.jsonl").unlink()
    assert read_run_summary(started).state == "stopped at step 0"
    assert (read_run_summary(started).best_value("val_top1"), read_run_summary(started).last_value("loss")) == (
        None,
        None,
    )
    saving = make_run(tmp_path / "saving", finished=False)
    (saving / "model").mkdir()
    (saving / "model" / "model.safetensors").write_bytes(b"")  # killed before its config.json was written
    assert read_run_summary(saving).state == "stopped at step 4"


def test_truncated_last_line_is_not_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "cut", rows=2, finished=False)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "epo')
    assert (read_run_summary(folder).state, read_run_summary(folder).step) == ("stopped at step 2", 2)


@pytest.mark.parametrize(
    ("name", "content", "state"),
    [
        ("run.json", "{", "damaged: run.json: Expecting property name"),
        ("run.json", "", "damaged: run.json: Expecting value"),
        ("run.json", "[]", "damaged: run.json: it is not a run's plan"),
        ("run.json", "\xff\xfe", "damaged: run.json: "),
        ("run.json", 10**5 * "[", "damaged: run.json: "),
        ("run.json", None, "damaged: run.json: No such file"),
        ("log.jsonl", '{"step": 1}\n{"st\n{"step": 2}\n', "damaged: 1 damaged lines in log.jsonl"),
        ("log.jsonl", "[1]\n7\nnull\n{}\n", "damaged: 4 damaged lines in log.jsonl"),
    ],
)
def test_damage_is_reported_in_the_state(tmp_path: Path, name: str, content: str | None, state: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content.encode("latin-1"))
    assert read_run_summary(folder).state.startswith(state)


def test_log_that_is_a_folder_is_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").mkdir()
    assert read_run_summary(folder).state == "damaged: log.jsonl: it is a folder; expected a file"


@pytest.mark.parametrize("line", ["", "{", '{"step": 1}'])
def test_log_of_too_many_lines_is_damage_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """An empty line costs as much time and memory as a short one, so lines are counted."""
    monkeypatch.setattr(run_folder, "MAX_LOG_CHARACTERS", 1000 * run_folder.MIN_LINE_CHARACTERS)
    (make_run(tmp_path / "a") / "log.jsonl").write_text(1001 * f"{line}\n")
    make_run(tmp_path / "b")
    states = [run.state for run in read_run_summaries(tmp_path)]
    assert states == ["damaged: log.jsonl: it has more than 128,000 characters or 1,000 lines", "finished"]


def test_log_of_damaged_lines_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "MAX_DAMAGED_LINES", 3)
    (make_run(tmp_path / "a") / "log.jsonl").write_text(4 * "{\n")
    assert read_run_summary(tmp_path / "a").state == "damaged: log.jsonl: it has more than 3 damaged lines"


def test_damaged_and_empty_lines_are_not_kept(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    (folder / "log.jsonl").write_text('\n{"step": 1}\n\n{\n{"step": 2}\n')
    found = run_folder.ParsedLog.read(folder / "log.jsonl")
    assert (len(found.lines), found.line_count, found.damaged_lines) == (2, 3, 1)


@pytest.mark.parametrize("steps", ["4", -1, 10**400])
def test_values_of_other_types_are_left_out(tmp_path: Path, steps: object) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"model": "ViT", "data": None, "recipe": {"name": 3}, "steps": steps}))
    (folder / "log.jsonl").write_text(
        f'{{"step": {10**20}}}\n'
        '{"step": 1, "loss": NaN, "val_top1": Infinity, "note": "x", "on": true, "accuracy": 0.5}\n'
    )
    run = read_run_summary(folder)
    assert (run.model, run.data, run.recipe, run.steps) == ("ViT", "", "", None)
    assert run.records == ({"step": 1, "accuracy": 0.5},)


def test_runs_of_a_folder_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "b")
    make_run(tmp_path / "a", finished=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "file.txt").write_text("mine")
    assert [run.name for run in read_run_summaries(tmp_path)] == ["a", "b", "empty"]
    assert read_run_summaries(tmp_path)[2].state == "damaged: run.json: No such file or directory"
    assert [run.name for run in read_run_summaries(tmp_path / "b")] == ["b"]


def test_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"nowhere cannot be read: No such file or directory; expected a folder of runs"
    ):
        read_run_summaries(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no runs; expected folders with a run\.json"):
        read_run_summaries(tmp_path)


def test_finished_run_is_found_for_evaluation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert find_finished_run(folder) == FinishedRun(model=folder / "model", data="photos", seed=7, val_share=0.25)
    assert find_finished_run(tmp_path) is None
    assert find_finished_run(tmp_path / "nowhere") is None
    (folder / "run.json").write_text("{")
    with pytest.warns(match="its validation images are unknown"):
        assert find_finished_run(folder) == FinishedRun(model=folder / "model")
    with pytest.raises(ConfigError, match=r"is a run that has not finished.* `resume` .*unfinished$"):
        find_finished_run(make_run(tmp_path / "unfinished", finished=False))
