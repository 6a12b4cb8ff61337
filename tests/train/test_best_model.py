"""`keep_best`: the model of the best evaluation is kept in best/, by the direction of the task's metric."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy_datasets import write_class_folders
from test_train_fit import PLAIN, StopAt, create_runs, data, model
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.cli import build_app
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.tasks.classification import Classification
from vitrail.tasks.metric import Metric
from vitrail.tasks.task import MeanMetrics, Source
from vitrail.train.fit import fit
from vitrail.train.run import start_run
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_list import read_run_summaries

KEPT = replace(PLAIN, loop=LoopSettings(epochs=3, batch=16, keep_best=True, save_every=1))


class ScriptedScores(Classification):
    """Returns a given score after each epoch, which is one step, and remembers the weights."""

    def __init__(self, *scores: float, higher: bool = True) -> None:
        super().__init__(model())
        self.metrics = (Metric(name="score", label="score", higher_is_better=higher),)  # pyright: ignore[reportAttributeAccessIssue]
        self.scores, self.weights = scores, dict[int, Tensor]()

    def evaluate(self, source: Source, clock: Clock, **options: Any) -> Any:  # noqa: ARG002
        self.weights[clock.step] = self.backbone.state_dict()["head.weight"].clone()
        return MeanMetrics(metrics={"score": self.scores[clock.step - 1], "loss": 1.0})


def train(task: nn.Module, run: RunFolder | None, stop: int = 0, recipe: Recipe = KEPT) -> None:
    fit(task, data(16), recipe, run=run, callbacks=StopAt(stop), device="cpu")


def load_head(run: RunFolder) -> Tensor:
    return vitrail.load(run.folder / "best").state_dict()["head.weight"]


@pytest.mark.parametrize(
    ("scores", "higher", "best"), [((1, 3, 2), True, 2), ((3, 1, 2), False, 2), ((1, 1, 0), True, 2)]
)
def test_best_of_three_evaluations_is_kept(scores: tuple[float, ...], higher: bool, best: int, tmp_path: Path) -> None:
    task, run = ScriptedScores(*scores, higher=higher), create_runs(tmp_path)[0]
    train(task, run)
    kept = load_head(run)
    assert torch.equal(kept, task.weights[best])
    assert not torch.equal(kept, task.weights[3])
    description = json.loads((run.folder / "best" / "config.json").read_text("utf-8"))
    assert description["provenance"]["validation"] == {"score": scores[best - 1]}
    assert description["labels"] == list(data().classes)


def test_resumed_run_keeps_the_better_earlier_model(tmp_path: Path) -> None:
    run = create_runs(tmp_path)[0]
    first = ScriptedScores(3, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        train(first, run, stop=2)
    before = (run.folder / "best" / "model.safetensors").read_bytes()
    train(ScriptedScores(3, 1, 2), run)
    assert (run.folder / "best" / "model.safetensors").read_bytes() == before


def test_killed_before_the_log_is_written_evaluates_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is kept first: a record in the log means that its model is kept."""
    run = create_runs(tmp_path)[0]
    append = RunFolder.append_to_log

    def fail_at_evaluation(self: RunFolder, record: Any) -> None:
        if record["step"] == 2 and "val_score" in record:
            raise KeyboardInterrupt
        append(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_to_log", fail_at_evaluation)
        with pytest.raises(KeyboardInterrupt):
            train(ScriptedScores(1, 3, 2), run)
    task = ScriptedScores(1, 3, 2)
    train(task, run)
    assert torch.equal(load_head(run), task.weights[2])


def test_save_that_was_interrupted_leaves_a_model_that_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is replaced at once; between the two, the description in the weights is used."""
    run = create_runs(tmp_path)[0]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(ScriptedScores(1, 2, 3), run, stop=2)
    task = ScriptedScores(1, 2, 3)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.checkpoint.layouts.vitrail.write_text", fail)
        with pytest.raises(KeyboardInterrupt):
            train(task, run)
    assert torch.equal(load_head(run), task.weights[2])
    assert vitrail.describe(run.folder / "best").provenance["validation"] == {"score": 2}


def test_without_a_run_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(ScriptedScores(1, 2, 3), None)
    assert list(tmp_path.iterdir()) == []


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"classes": 4, "channels": 3, "image_size": (16, 16)})
        self.linear = nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.mean((2, 3)))


def test_model_that_cannot_be_saved_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    run = create_runs(tmp_path)[0]
    with pytest.raises(ConfigError, match=r"^`keep_best` is true, but .* Plain is not a model of the package.*$"):
        train(Plain(), run)
    assert run.read_records() == []
    linked = create_runs(tmp_path / "linked")[0]
    (linked.folder / "best").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="best is a symbolic link"):
        train(ScriptedScores(1, 2, 3), linked)


@pytest.mark.parametrize(
    ("values", "message"), [({"loss": 1.0}, "loss; expected 'score'"), ({"score": float("nan")}, "nan")]
)
def test_evaluation_without_the_metric_that_counts_is_an_error(
    values: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: object, **__: object) -> MeanMetrics:
        return MeanMetrics(metrics=values)

    monkeypatch.setattr(ScriptedScores, "evaluate", evaluate)
    with pytest.raises(ConfigError, match=f"ScriptedScores .*{message}"):
        train(ScriptedScores(1), None)


def test_metrics_that_would_replace_values_of_the_log_are_errors() -> None:
    for name in ("step", "val_loss"):

        def objective(module: nn.Module, inputs: Any, name: str = name) -> tuple[Tensor, dict[str, Tensor]]:
            loss = module(inputs.images).sum()
            return loss, {name: loss}

        with pytest.raises(ConfigError, match=f"metric '{name}'; expected another name"):
            fit(model(), data(16), PLAIN, objective=objective, device="cpu")


def test_commands_with_the_best_model_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_class_folders(tmp_path / "photos" / "train", ants=4, bees=4)
    write_class_folders(tmp_path / "photos" / "val", ants=2, bees=2)
    sizes = {"image_size": 16, "patch_size": 8, "width": 12, "depth": 1, "heads": 1}
    recipe = Recipe(model="ViT-Ti/16", fields=sizes, loop=LoopSettings(epochs=2, batch=8, keep_best=True))
    start_run(Request(data="photos", recipe=recipe), Path("runs/one"))
    for folder in ("model", "best"):
        validation = json.loads(Path(f"runs/one/{folder}/config.json").read_text("utf-8"))["provenance"]["validation"]
        assert list(validation) == ["top1", "top5"]
    assert [run.name for run in read_run_summaries(Path("runs"))] == ["one"]
    capsys.readouterr()
    words = ["eval", "runs/one/best", "--data", "photos", "--json"]
    build_app()(words, exit_on_error=False, print_error=False, result_action="return_value")
    best = max(each["val_top1"] for each in RunFolder(Path("runs/one")).read_records() if "val_top1" in each)
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(best)
