"""What every task without labels must do: resume exactly, agree on two processes, be copied, and be evaluated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pretraining_cases import CASES
from support.toy_task import RECIPE, make_data
from test_train_fit import StopAt, assert_same, read_checkpoint_and_log
from torch import multiprocessing

from vitrail.base.errors import ConfigError
from vitrail.distributed import Ranks
from vitrail.recipes.recipe import OptimizationSettings, Recipe
from vitrail.tasks.task import Task
from vitrail.train.fit import fit
from vitrail.train.run_folder import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::vitrail.tasks.metric.CollapseWarning")  # toy runs have no warm-up
NOISE = {"stochastic_depth": 0.3}


@pytest.fixture(autouse=True)
def skip_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take two thirds of the time of a toy run."""
    monkeypatch.setattr("vitrail.train.fit.plot_training_curves", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]


def change_loop(recipe: Recipe, **settings: Any) -> Recipe:
    return replace(recipe, loop=replace(recipe.loop, **settings))


def make_smooth_recipe(name: str) -> Recipe:
    """With SGD: Adam amplifies rounding errors."""
    return replace(RECIPE, optimization=OptimizationSettings(optimizer="sgd", lr=CASES[name].lr))


def train(task: Task, recipe: Recipe, run: Path | None = None, stop: int = 0) -> Any:
    return fit(task, make_data(), recipe, run=run, callbacks=StopAt(stop), device="cpu")


def make_task(name: str, **noise: Any) -> Task:
    torch.manual_seed(2)
    return CASES[name].make(**noise)


@pytest.mark.parametrize("name", CASES)
def test_resume_is_bit_identical(name: str, tmp_path: Path) -> None:
    recipe = change_loop(RECIPE, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(make_task(name, **NOISE), recipe, tmp_path / "stopped", stop=5)
    train(make_task(name, **NOISE), recipe, tmp_path / "stopped")
    train(make_task(name, **NOISE), recipe, tmp_path / "never stopped")
    assert_same(RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "never stopped"))


def train_on_rank(rank: int, folder: str) -> None:
    """A process of two, forked so that nothing is imported again; it trains every task."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name in CASES:
        recipe, ranks = make_smooth_recipe(name), Ranks(rank, 2, rank)
        fit(make_task(name), make_data(), recipe, run=Path(folder) / name, ranks=ranks, device="cpu")
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """Weights, teachers, centers and every metric in the log."""
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=train_on_rank, args=(rank, str(tmp_path / "two"))) for rank in (0, 1)]
    (tmp_path / "two").mkdir()
    for process in processes:
        process.start()
    for name in CASES:
        train(make_task(name), make_smooth_recipe(name), tmp_path / "one" / name)
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    for name in CASES:
        (one, records), (two, others) = (
            read_checkpoint_and_log(RunFolder(tmp_path / folder / name)) for folder in ("one", "two")
        )
        for key in (key for key in one if key.startswith(("model/", "optimizer/"))):
            torch.testing.assert_close(one[key], two[key], atol=1e-5, rtol=0, msg=f"{name} {key}")
        for mine, its in zip(records, others, strict=True):
            assert mine == pytest.approx(its, abs=1e-5), name


@pytest.mark.parametrize("name", CASES)
def test_accumulation_is_exact_or_refused(name: str, tmp_path: Path) -> None:
    split = change_loop(make_smooth_recipe(name), accumulate=2)
    if not CASES[name].exact_accumulation:
        with pytest.raises(ConfigError, match=r"^`accumulate` is 2; expected 1 .* since .*$"):
            train(make_task(name), split)
        return
    train(make_task(name), split, tmp_path / "split")
    train(make_task(name), make_smooth_recipe(name), tmp_path / "complete")
    (split_run, _), (complete, _) = (
        read_checkpoint_and_log(RunFolder(tmp_path / run)) for run in ("split", "complete")
    )
    for key in (key for key in complete if key.startswith("model/")):
        torch.testing.assert_close(split_run[key], complete[key], atol=1e-5, rtol=0, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_copy_has_its_own_weights(name: str) -> None:
    task = make_task(name)
    copy = task.copy()
    for (key, mine), its in zip(task.state_dict().items(), copy.state_dict().values(), strict=True):
        assert torch.equal(mine, its), key
        assert mine.data_ptr() != its.data_ptr() or not mine.numel(), key


@pytest.mark.parametrize("name", CASES)
def test_evaluation_has_the_loss_and_measures_the_features(name: str) -> None:
    task = make_task(name)
    result = train(task, change_loop(RECIPE, epochs=1))
    assert {"loss", "spread", "effective_rank", "knn"} <= set(result.evaluation.metrics)
    assert result.model is task.result
    assert result.model.config.classes == 0
