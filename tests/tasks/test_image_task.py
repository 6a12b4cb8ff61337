"""A task that needs no classes: trained on a flat folder, resumed, listed, plotted, and used for features."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from support.toy_datasets import write_class_folders, write_image
from test_train_fit import assert_same
from torch import Tensor, nn

import vitrail
from vitrail import tasks
from vitrail.base.errors import ConfigError, VitrailError
from vitrail.cli import build_app
from vitrail.data.batch import Batch
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_task import ImageTask, build_image_task
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.task import BuildContext, TaskKind, TaskSetup
from vitrail.train.plan import Runtime, plan_request
from vitrail.train.resume import resume_run
from vitrail.train.run import start_run
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_list import read_run_summary

SIZES = {"image_size": 16, "patch_size": 8, "width": 12, "depth": 1, "heads": 1}


class MeanColor(ImageTask):
    """Predicts the mean color of an image."""

    metrics = (Metric(name="rmse", label="RMSE", higher_is_better=False), LOSS_METRIC)
    shares = ()

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone, self.predictor = backbone, nn.Linear(backbone.config.width, 3)

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        images = self.normalize(batch["images"])
        loss = F.mse_loss(self.predictor(self.backbone(images)), images.mean((2, 3)))
        return loss, {"rmse": loss.detach().sqrt()}


def build_mean_color(request: Request, context: BuildContext) -> TaskSetup:
    return build_image_task(request, context, MeanColor)


def run_command(*words: object) -> None:
    build_app()(list(map(str, words)), exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task is registered, and photos is a flat folder of images."""
    kind = TaskKind(name="toy", settings=None, build=build_mean_color, needs_classes=False)
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, "toy"))
    monkeypatch.setitem(sys.modules, "vitrail.tasks.toy", SimpleNamespace(TASK=kind))
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        write_image(tmp_path / "photos" / f"{number}.png", number)


def make_toy_request(data: str = "photos", init: str | None = None, **settings: Any) -> Request:
    loop = LoopSettings(epochs=3, batch=4, save_every=1, keep_best=True)
    recipe = Recipe(name="toy", model=None if init else "ViT-Ti/16", loop=loop, task={"name": "toy"})
    return Request(data=data, recipe=recipe.with_settings({"fields": {} if init else SIZES, **settings}), init=init)


def test_run_without_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "runs" / "one")
    start_run(make_toy_request(), run.folder, Runtime(report=print))
    out = capsys.readouterr().out
    assert "photos: 8 training images, 2 validation images, no classes" in out
    assert "validation: RMSE 0." in out
    assert "vitrail embed" in out
    assert "vitrail predict" not in out
    plan = run.load_plan()
    assert (plan["data"]["classes"], plan["model"]["config"]["classes"]) == ([], 0)
    assert (plan["task"]["name"], plan["task"]["metrics"][0]["name"]) == ("toy", "rmse")
    assert (run.folder / "curves.png").exists()

    stopped = RunFolder(tmp_path / "runs" / "stopped")
    shutil.copytree(run.folder, stopped.folder)
    stopped.list_checkpoints()[-1].unlink()
    shutil.rmtree(stopped.folder / "model")
    resume_run(stopped.folder)
    assert_same(run, stopped)

    summary = read_run_summary(run.folder)
    values = [each["val_rmse"] for each in run.read_records() if "val_rmse" in each]
    assert (summary.state, summary.best_metric, len(values)) == ("finished", min(values), 3)
    capsys.readouterr()
    run_command("runs", "runs", "--out", "curves.png")
    listed = " ".join(capsys.readouterr().out.splitlines()[2].split())
    assert f" 6/6 RMSE {values[-1]:.4g} {min(values):.4g} " in listed

    for folder in ("model", "best"):
        description = json.loads((run.folder / folder / "config.json").read_text("utf-8"))
        assert (description["labels"], list(description["provenance"]["validation"])) == (None, ["rmse"])
    model = vitrail.load(run.folder / "model")
    assert model.config.classes == 0
    assert not any("head" in name for name in model.state_dict())
    run_command("embed", run.folder, "photos", "-o", "features.npy")
    assert np.load("features.npy").shape == (10, SIZES["width"])
    with pytest.raises(VitrailError, match="has no head; expected one with classes"):
        run_command("predict", run.folder, "photos")
    with pytest.raises(VitrailError, match="class"):
        run_command("eval", run.folder)


def test_model_has_no_head_even_if_the_images_have_classes(tmp_path: Path) -> None:
    """A checkpoint loses its head; labels are not saved with a model without one."""
    write_class_folders(tmp_path / "classes", ants=4, bees=4)
    vitrail.save(
        vitrail.create("ViT-Ti/16", classes=2, **SIZES),
        tmp_path / "init",
        labels=["ants", "bees"],
        preprocessing=vitrail.Preprocessing(image_size=16),
    )
    for request in (make_toy_request("classes"), make_toy_request("classes", init="init")):
        plan = plan_request(request)
        assert (plan.model.config.classes, "2 classes" in plan.source.describe()) == (0, True)
        assert plan.source.describe_model_input(plan.model)["labels"] is None
    with pytest.raises(ConfigError, match="classes is 5; expected 0, since the task toy has no classes"):
        plan_request(make_toy_request(fields={**SIZES, "classes": 5}))


def test_fit_trains_a_task_on_images_without_classes() -> None:
    task = MeanColor(vitrail.create("ViT-Ti/16", classes=0, **SIZES))
    result = vitrail.fit(task, "photos", make_toy_request().recipe, steps=1, run="fitted", device="cpu")
    assert list(result.evaluation.metrics) == ["loss", "rmse"]
    assert read_run_summary(Path("fitted")).last_metric == result.evaluation.metrics["rmse"]
    with pytest.raises(VitrailError, match="photos"):
        vitrail.fit(vitrail.create("ViT-Ti/16", classes=2, **SIZES), "photos", device="cpu")


def test_classification_refuses_images_without_classes() -> None:
    with pytest.raises(VitrailError, match="photos"):
        plan_request(make_toy_request(task={"name": "classification"}))


def test_ablation_of_another_task(capsys: pytest.CaptureFixture[str]) -> None:
    Path("toy.yaml").write_text(
        "model: ViT-Ti/16\nfields: {image_size: 16, patch_size: 8, width: 12, depth: 1, heads: 1}\n"
        "batch: 4\nepochs: 1\nflip: 0.5\ntask: {name: toy}\n"
    )
    run_command("ablate", "toy.yaml", "--without", "flip", "--data", "photos", "--out", "out", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["metric"]["name"]) == ("toy", "rmse")
    full, without = found["rows"]
    assert without["gain"] == pytest.approx(full["rmse"] - without["rmse"])
    with pytest.raises(ConfigError, match="expected classification"):
        run_command("study", "positions", "--recipe", "toy.yaml", "--data", "photos", "--dry-run")
