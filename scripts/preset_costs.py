"""Write costs.json and families.json in models/catalog/, by which models are found without importing them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track

from vitrail.inspection.summary import summarize
from vitrail.models.base.contract import ImageModel, check_declarations
from vitrail.models.base.family import Family
from vitrail.models.catalog.families import INDEX_FILE, describe_family, load_built_in_families, natural_sort_key
from vitrail.models.catalog.preset_costs import COSTS_FILE


@dataclass(frozen=True)
class PresetCost:
    family: str
    image_size: tuple[int, int] | None  # None: it reads text
    parameters: int
    macs: int | None  # for one image
    aliases: tuple[str, ...]


def compute_preset_cost(family: Family, name: str) -> PresetCost:
    config = family.presets[name]
    aliases = tuple(alias for alias, preset in family.aliases.items() if preset == name)
    with torch.device("meta"):
        model = family.build(config)
        check_declarations(model)
        if not issubclass(family.build, ImageModel):
            return PresetCost(family.name, None, sum(each.numel() for each in model.parameters()), None, aliases)
        summary = summarize(model, depth=1)
    return PresetCost(family.name, config.image_size, summary.parameters, summary.macs, aliases)


def format_json_lines(entries: Mapping[str, Any]) -> str:
    """JSON with one line per dataclass, which keeps diffs readable."""
    lines = [f"  {json.dumps(name)}: {json.dumps(asdict(each))}" for name, each in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def list_presets_by_name() -> list[tuple[str, Family]]:
    """All presets with their families, in the order of `list_models`."""
    found = [(name, family) for family in load_built_in_families() for name in family.presets]
    return sorted(found, key=lambda each: natural_sort_key(each[0]))


if __name__ == "__main__":
    costs = {name: compute_preset_cost(family, name) for name, family in track(list_presets_by_name(), "counting")}
    COSTS_FILE.write_text(format_json_lines(costs), "utf-8")
    INDEX_FILE.write_text(
        format_json_lines({each.name: describe_family(each) for each in load_built_in_families()}), "utf-8"
    )
