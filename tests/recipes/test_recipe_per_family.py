"""The table of docs/training.md recommends a recipe for every family, with settings that exist."""

import re
from pathlib import Path

import pytest

from vitrail.base.json_yaml import parse_yaml
from vitrail.models import FAMILIES
from vitrail.models.catalog.families import load_built_in_families
from vitrail.recipes.recipe import open_recipe

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
TEXT_FAMILIES = {"transformer", "seq2seq"}
ROWS = re.findall(r"^\| (.*?) \| (`--recipe .*?) \| ?(.*?) ?\|$", PAGE.read_text(), re.MULTILINE)


def test_every_family_that_reads_images_has_a_recipe() -> None:
    named = [name for families, _, _ in ROWS if "SimpleViT" not in families for name in re.findall("`(.*?)`", families)]
    assert sorted(named) == sorted(set(FAMILIES) - TEXT_FAMILIES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", ""))
def test_its_settings_exist(row: tuple[str, str, str]) -> None:
    names, first, by_size = row
    words = re.findall(r"--([a-z-]+) ([a-z0-9.-]+)", first.partition("`")[2].partition("`")[0])
    others = re.findall(r"--([a-z-]+) ([0-9][0-9.e-]*)", by_size)
    settings = {name.replace("-", "_"): parse_yaml(value) for name, value in [*words[1:], *others]}
    rates = {name: settings.pop(name) for name in ("stochastic_depth",) if name in settings}
    assert all(0 <= float(rate) < 1 for rate in rates.values())
    recipe = open_recipe(words[0][1]).with_settings(settings)
    assert words[0] == ("recipe", recipe.name)
    fields = {
        *rates,
        *(recipe.fields if recipe.model is None else ()),
    }  # with another model, those of its own are not used
    for family in load_built_in_families():
        if f"`{family.name}`" in names:
            assert fields <= family.config.__dataclass_fields__.keys()
