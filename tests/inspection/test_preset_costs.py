"""The stored index of names, costs and tensor names is complete and up to date."""

import json
from typing import Any

import pytest
from preset_costs import (
    PresetCost,
    compute_preset_cost,
    format_json_lines,
    list_presets_by_name,
)

import vitrail
from vitrail.models.catalog.families import INDEX_FILE, describe_family, find_preset, load_built_in_families
from vitrail.models.catalog.preset_costs import COSTS_FILE

STORED: dict[str, dict[str, Any]] = json.loads(COSTS_FILE.read_text("utf-8"))


def stored(name: str) -> PresetCost:
    entry: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in STORED[name].items()}
    return PresetCost(**entry)


def test_every_preset_is_stored() -> None:
    presets = list_presets_by_name()
    assert list(STORED) == vitrail.list_models() == [name for name, _ in presets], "run `make costs`"
    for name, family in presets:
        aliases = [alias for alias, preset in family.aliases.items() if preset == name]
        assert (STORED[name]["family"], STORED[name]["aliases"]) == (family.name, aliases), "run `make costs`"
    assert COSTS_FILE.read_text("utf-8") == format_json_lines({name: stored(name) for name in STORED})


def test_every_family_is_stored() -> None:
    entries = {family.name: describe_family(family) for family in load_built_in_families()}
    assert INDEX_FILE.read_text("utf-8") == format_json_lines(entries), "run `make costs`"


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "deit_base_distilled_patch16_384",
        "vit_small_r26_s32_384",
        "linformer_tiny_patch16_224",
        "axial_tiny_patch16_224",
        "resnet20_cifar",
        "regnety_040",
        "transformer_base",
        "lstm_luong_cpu",
    ],
)
def test_costs_of_one_model_of_each_kind(name: str) -> None:
    assert compute_preset_cost(find_preset(name)[0], name) == stored(name), "run `make costs`"


@pytest.mark.slow
@pytest.mark.parametrize("name", vitrail.list_models())
def test_all_costs(name: str) -> None:
    assert compute_preset_cost(find_preset(name)[0], name) == stored(name), "run `make costs`"
