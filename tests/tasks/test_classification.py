"""Classification as a task is what `fit` does with a plain model, and its inputs depend on seed and step alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_fit import EVERYTHING, NOISY, assert_same, data, model

from vitrail.data.batch import Batch
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.schedule import Clock
from vitrail.tasks.classification import Classification, LossInputs, classification_loss
from vitrail.tasks.image_task import open_image_source
from vitrail.train.fit import fit
from vitrail.train.run_folder import RunFolder

RECIPE = replace(EVERYTHING, loop=replace(EVERYTHING.loop, epochs=1, early_size=8))
FIELDS = {**NOISY, "dynamic": True}


def test_task_gives_the_result_of_the_plain_model(tmp_path: Path) -> None:
    given: dict[str, Any] = {"plain": model(**FIELDS), "task": Classification(model(**FIELDS))}
    given["objective"] = Classification(model(**FIELDS), classification_loss)
    results = {name: fit(each, data(), RECIPE, run=tmp_path / name, device="cpu") for name, each in given.items()}
    for name in ("task", "objective"):
        assert_same(RunFolder(tmp_path / "plain"), RunFolder(tmp_path / name))
        assert type(results[name].model) is type(given["plain"])
        assert results[name].evaluation.top1 == results["plain"].evaluation.top1


def prepare(step: int, recipe: Recipe = RECIPE) -> tuple[Batch, LossInputs]:
    """The inputs of a step, from a new task."""
    torch.manual_seed(step)
    task = Classification(model(**FIELDS))
    source = open_image_source(task, data(), recipe)
    task.setup(source, recipe)
    batch = next(iter(source.load_batches(range(step, 9))))
    return batch, task.prepare_inputs(batch, Clock(step=step, steps=9, steps_per_epoch=5))


@pytest.mark.parametrize(("step", "side"), [(4, 8), (5, 16)])
def test_inputs_are_a_function_of_seed_and_step(step: int, side: int) -> None:
    (batch, inputs), (_, again) = prepare(step), prepare(step)
    assert inputs.images.shape == (8, 3, side, side)  # half of the steps use the early size
    for one, other in zip(vars(inputs).values(), vars(again).values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(inputs.labels, batch["labels"])
    torch.testing.assert_close(inputs.targets.sum(1), torch.ones(8))
    assert (inputs.targets.max(1).values < 1).all(), "labels are smoothed and mixed"
    reseeded = replace(RECIPE, loop=replace(RECIPE.loop, seed=4))
    other_seed, next_step = prepare(step, reseeded)[1], prepare(step + 1)[1]
    assert not torch.equal(inputs.targets, other_seed.targets)
    assert not torch.equal(inputs.targets, next_step.targets)


def test_mixing_depends_on_the_step_and_not_on_the_images() -> None:
    """The same batch is mixed in another way at another step, and in the same way at the same one."""
    task = Classification(model(**FIELDS))
    source = open_image_source(task, data(), RECIPE)
    task.setup(source, RECIPE)
    batch = next(iter(source.load_batches(range(1))))
    first, second, again = (
        task.prepare_inputs(batch, Clock(step=step, steps=9, steps_per_epoch=5)) for step in (5, 6, 5)
    )
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, second.images)
