"""Names that had a British spelling are still read, and written in the American one."""

from dataclasses import asdict

import pytest

import vitrail
from vitrail.cli.usage_errors import use_american_names
from vitrail.data.images.augment.config import Augmentation
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.task_settings import MppSettings, SimClrSettings
from vitrail.tasks.pretraining import mpp, simclr
from vitrail.tasks.task import Task, parse_task_settings
from vitrail.train.resume import find_differences


def test_fields_of_models() -> None:
    old = vitrail.create("cct_2_3x2_32", neighbours=False, classes=2)
    assert asdict(old.config)["neighbors"] is False
    assert vitrail.create("igpt_cpu", colours=9, image_size=4).config.colors == 9


def test_settings_and_choices_of_recipes() -> None:
    recipe = Recipe().with_settings({"crop": "centre", "task": {"name": "simclr", "grey": 0.5}})
    assert (recipe.augmentation.crop, recipe.task["gray"]) == ("center", 0.5)
    assert Augmentation(crop="centre") == Augmentation()  # pyright: ignore[reportArgumentType]
    assert parse_task_settings(simclr.TASK, recipe) == SimClrSettings(gray=0.5)
    recipe = Recipe().with_settings({"task": {"name": "mpp", "target": "mean_colour"}})
    assert parse_task_settings(mpp.TASK, recipe) == MppSettings(target="mean_color")


def test_recorded_models() -> None:
    assert not find_differences(
        {"config": {"neighbours": True, "rotary": "centred"}}, {"config": {"neighbors": True, "rotary": "centered"}}
    )
    assert find_differences({"config": {"neighbours": True}}, {"config": {"neighbors": False}})


def test_options() -> None:
    old = ["explain", "--method", "neighbours", "--crop=centre", "--grey", "0.1", "--centre-momentum=1", "-o", "grey"]
    new = ["explain", "--method", "neighbors", "--crop=center", "--gray", "0.1", "--center-momentum=1", "-o", "grey"]
    assert use_american_names(old) == new


def test_hooks_and_functions() -> None:
    with pytest.warns(DeprecationWarning, match="Old.initialise is now called initialize"):

        class Old(Task):
            def initialise(self, source: object, recipe: object) -> None:
                self.used = (source, recipe)

    old = Old()
    old.initialize("source", "recipe")  # pyright: ignore[reportArgumentType]
    assert old.used == ("source", "recipe")
    assert vitrail.find_neighbours is vitrail.find_neighbors  # pyright: ignore[reportAttributeAccessIssue]
