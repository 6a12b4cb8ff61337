"""Tasks that are broken or do not fit the model or the recipe: one line, before the first update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.toy_task import RECIPE, SelfDistillation, make_backbone, make_data, make_task
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint.run_files import find_finished_run
from vitrail.data.batch import Batch
from vitrail.data.images.augment.views import View
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.tasks.classification import classification_loss
from vitrail.tasks.image_task import check_patches_can_be_dropped, check_patches_can_be_masked
from vitrail.tasks.task import Task
from vitrail.train.fit import fit
from vitrail.train.run_folder import RunFolder


class Broken(Task):
    """Returns what a test gives it."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.backbone, self.output = make_backbone(), output

    def forward(self, batch: Batch, clock: Clock) -> Any:  # noqa: ARG002
        return self.output(self.backbone(batch["images"].float()).sum())

    def before_step(self, clock: Clock) -> None:  # noqa: ARG002
        raise AssertionError("a broken task must be refused before its first update")


BROKEN_OUTPUTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda loss: (loss * torch.nan, {}), "the loss of Broken is nan in its first step"),
    (lambda loss: (loss * torch.inf, {}), "the loss of Broken is -?inf"),
    (lambda loss: (loss.detach(), {}), "the loss of Broken has no gradient"),
    (lambda loss: (loss.item(), {}), "the loss of Broken is a float; expected a tensor"),
    (lambda loss: (loss.repeat(2), {}), r"a tensor of shape \(2,\)"),
    (lambda loss: (loss * 1j, {}), r"shape \(\) and torch.complex64"),
    (lambda loss: loss, "Broken returned a Tensor; expected the loss and a mapping"),
    (lambda loss: (loss, 0.5), "Broken returned a tuple"),
    (lambda loss: (loss, {"accuracy": "high"}), "the metric 'accuracy' of Broken is 'high'"),
    (lambda loss: (loss, {"accuracy": None}), "the metric 'accuracy' of Broken is None"),
    (lambda loss: (loss, {"accuracy": torch.nan}), "the metric 'accuracy' of Broken is nan"),
    (lambda loss: (loss, {"accuracy": torch.ones(2)}), "the metric 'accuracy' of Broken"),
    (lambda loss: (loss, {"accuracy": torch.ones(2, 2)}), "the metric 'accuracy' of Broken"),
    (lambda loss: (loss, {"accuracy": torch.tensor(1j)}), "the metric 'accuracy' of Broken"),
    (lambda loss: (loss, {"loss": 1.0}), "a metric named 'loss'"),
    (lambda loss: (loss, {5: 1.0}), "a metric named 5"),
]


@pytest.mark.parametrize(("output", "message"), BROKEN_OUTPUTS)
def test_broken_output_is_a_one_line_error_before_the_first_update(
    output: Callable[[Tensor], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        fit(Broken(output), make_data(), Recipe(loop=LoopSettings(batch=8)), steps=1, device="cpu")
    assert "\n" not in str(caught.value)


def test_metrics_may_be_numbers_or_tensors_of_one_number() -> None:
    class Unusual(Broken):
        def before_step(self, clock: Clock) -> None: ...

    task = Unusual(lambda loss: (loss[None], {"one": 1, "two": torch.full((1, 1), 2.0), "three": np.float32(3)}))
    result = fit(task, make_data(), Recipe(loop=LoopSettings(batch=8, accumulate=2)), steps=2, device="cpu")
    assert result.records[0].items() >= {"one": 1, "two": 2, "three": 3}.items()


def test_metrics_that_change_are_refused_and_nan_is_not_logged(tmp_path: Path) -> None:
    class Changing(SelfDistillation):
        def forward(self, batch: Batch, clock: Clock) -> Any:
            loss, metrics = super().forward(batch, clock)
            return loss, {0: metrics, 1: {"agreement": torch.nan}, 2: {"other": 1}}[clock.step]

    class Late(SelfDistillation):
        def forward(self, batch: Batch, clock: Clock) -> Any:
            loss, metrics = super().forward(batch, clock)
            return (loss, metrics) if clock.step == 0 else (loss, {"agreement": "high"})

    with pytest.raises(ConfigError, match=r"'agreement' of Late is 'high'"):
        fit(Late(make_backbone()), make_data(), RECIPE, steps=2, device="cpu")
    with pytest.raises(ConfigError, match=r"metrics of Changing are other at step 3; expected .*: agreement"):
        fit(Changing(make_backbone()), make_data(), RECIPE, steps=3, device="cpu", run=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run is a run of vitrail\.fit.*vitrail\.save\(result\.model, "):
        find_finished_run(tmp_path / "run")
    plan = RunFolder(tmp_path / "run").load_plan()
    with pytest.raises(CheckpointError, match=r"no request, as in a run of vitrail\.fit"):
        Request.from_json(plan.get("request"), "run")
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert ["agreement" in line for line in lines] == [True, False]


def test_what_a_task_cannot_do_is_refused() -> None:
    class Contrastive(SelfDistillation):
        no_accumulation_reason = "every image is compared with all others of the batch"

    refused = {
        "`ema` is 0.9; expected 0, since SelfDistillation": (make_task(), RECIPE.with_settings({"ema": 0.9})),
        "`accumulate` is 2; expected 1 for Contrastive, since every image": (
            Contrastive(make_backbone()),
            RECIPE.with_settings({"accumulate": 2}),
        ),
    }
    for message, (task, recipe) in refused.items():
        with pytest.raises(ConfigError, match=message):
            fit(task, make_data(), recipe, device="cpu")
    with pytest.raises(ConfigError, match="a task has its own loss"):
        fit(make_task(), make_data(), RECIPE, objective=classification_loss)


def test_model_that_lacks_what_a_task_needs_is_refused() -> None:
    mixing = vitrail.create("t2t_vit_7", image_size=32, width=16, depth=1, heads=2)
    with pytest.raises(
        ConfigError, match=r"MAE needs patches that can be dropped; this T2T.*it mixes patches in its stem"
    ):
        check_patches_can_be_dropped("MAE", mixing)
    with pytest.raises(ConfigError, match="SimMIM needs patches that can be masked; this T2T"):
        check_patches_can_be_masked("SimMIM", mixing)
    relative = make_backbone(positions="relative")
    check_patches_can_be_masked("SimMIM", relative)
    with pytest.raises(ConfigError, match=r"MAE needs patches that can be dropped; this ViT.*'relative'"):
        check_patches_can_be_dropped("MAE", relative)
    check_patches_can_be_dropped("MAE", make_backbone())


def test_incomplete_task_is_a_one_line_error() -> None:
    class NoBackbone(Task): ...

    class NoMetrics(SelfDistillation):
        metrics = ()

    class NoClock(SelfDistillation):
        def forward(self, batch: Batch) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    class NoModel(SelfDistillation):
        @property
        def result(self) -> Any:
            return None

    class ListOfViews(SelfDistillation):
        views = cast(Any, [View(size=16)])

    class OwnEvaluation(SelfDistillation):
        def evaluate(self, *_: Any, **__: Any) -> Any:
            return {"loss": 1.0}

    refused = {
        "NoBackbone has no backbone": NoBackbone(),
        r"metrics of NoMetrics is \(\)": NoMetrics(make_backbone()),
        "forward of NoClock .*clock": NoClock(make_backbone()),
        "the result of NoModel is a NoneType": NoModel(make_backbone()),
        "views is a list": ListOfViews(make_backbone()),
        "evaluate of OwnEvaluation returned a dict": OwnEvaluation(make_backbone()),
    }
    for message, task in refused.items():
        with pytest.raises(ConfigError, match=message):
            fit(task, make_data(), RECIPE, steps=1, device="cpu")


def test_task_that_cannot_be_copied_is_refused() -> None:
    task = Broken(lambda loss: (loss, {}))
    task.output = cast(Any, (number for number in range(3)))
    with pytest.raises(ConfigError, match=r"Broken cannot be copied .*generator"):
        fit(task, make_data(), Recipe(loop=LoopSettings(batch=8, ema=0.9)), steps=1, device="cpu")


def test_metrics_of_an_evaluation_have_the_order_of_the_task() -> None:
    """Processes add them up by place, and the order of a set differs between processes."""

    class Many(Broken):
        def before_step(self, clock: Clock) -> None: ...

    names = [f"metric{number}" for number in range(12)]
    task = Many(lambda loss: (loss, {name: float(name[6:]) for name in names}))
    result = fit(task, make_data(), Recipe(loop=LoopSettings(batch=8)), steps=1, device="cpu")
    assert list(result.evaluation.metrics) == ["loss", *names]
