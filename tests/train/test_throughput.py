from dataclasses import replace

import pytest
import torch
from test_train_fit import PLAIN, data, model
from torch import nn

from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.tasks.classification import Classification
from vitrail.tasks.image_task import open_image_source
from vitrail.train.fit import fit
from vitrail.train.plan import Plan
from vitrail.train.throughput import Throughput, measure_throughput


def measure(given: nn.Module, recipe: Recipe) -> Throughput:
    source = open_image_source(Classification(given), data(), recipe, Preprocessing(image_size=16, crop=1.0))
    return measure_throughput(Plan(task=Classification(given), source=source, recipe=recipe))


def test_steps_and_evaluations_fit_into_the_budget() -> None:
    speed = Throughput(step_seconds=0.5, evaluation_seconds=10.0, peak_bytes=0)
    steps = speed.steps_within(600, steps_per_epoch=100, eval_every=1)
    assert steps == (600 * 0.97 - 10) // (0.5 + 0.1)
    assert speed.estimate_seconds(steps, 100, 1) <= 600
    assert speed.steps_within(600, 100, 0) == (600 * 0.97 - 10) // 0.5
    with pytest.raises(ConfigError, match=r"add at least 0\.1 to `minutes`"):
        speed.steps_within(9, 100, 1)


def test_measuring_changes_neither_model_nor_rng(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.train.throughput.MIN_TIMED_SECONDS", 0.0)
    start, chance = model(dropout=0.1), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    found = measure(start, PLAIN)
    assert found.step_seconds > 0
    assert found.evaluation_seconds > 0
    assert found.peak_bytes > 1e7
    assert all(torch.equal(tensor, before[name]) for name, tensor in start.state_dict().items())
    assert torch.equal(torch.get_rng_state(), chance)


def test_progressive_resizing_is_measured_at_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.train.throughput.MIN_TIMED_SECONDS", 0.0)
    sizes = list[int]()
    dynamic_model = model(dynamic=True)
    dynamic_model.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[-1]))
    recipe = replace(PLAIN, loop=LoopSettings(batch=8, early_size=8, early_share=0.5))
    measure(dynamic_model, recipe)
    assert sizes[:-3] == [8] * 5 + [16] * 5


def test_progressive_resizing_changes_size_at_early_share() -> None:
    sizes = list[int]()
    dynamic_model = model(dynamic=True)
    dynamic_model.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[-1] * module.training))
    fit(
        dynamic_model,
        data(),
        replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, early_size=8, early_share=0.3)),
        device="cpu",
    )
    assert [size for size in sizes if size] == [8] * 3 + [16] * 7
    with pytest.raises(ConfigError, match="`early_size` is 8; expected 0, or a dynamic model"):
        fit(model(), data(), replace(PLAIN, loop=LoopSettings(batch=8, early_size=8)), device="cpu")


def test_fit_takes_a_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Throughput(step_seconds=600.0, evaluation_seconds=20.0, peak_bytes=0)
    monkeypatch.setattr("vitrail.train.throughput.measure_throughput", lambda _: speed)  # pyright: ignore[reportUnknownLambdaType]
    result = fit(model(), data(), replace(PLAIN, loop=LoopSettings(batch=8, minutes=60, eval_every=0)), device="cpu")
    assert result.steps == (3600 * 0.97 - 20) // 600
    assert result.evaluation is not None
