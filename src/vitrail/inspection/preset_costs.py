"""Compute parameters and MACs of every preset for models/costs.json, which `vitrail models` reads without torch."""

import json
from dataclasses import asdict, dataclass

import torch
from rich.progress import track

from vitrail.inspection.summary import summarize
from vitrail.models.catalog import create, find_preset, list_models
from vitrail.models.contract import ImageModel
from vitrail.models.preset_list import COSTS_FILE


@dataclass(frozen=True)
class PresetCost:
    family: str
    image_size: tuple[int, int] | None  # None: it reads text
    parameters: int
    macs: int | None  # for one image
    aliases: tuple[str, ...]


def compute_preset_cost(name: str) -> PresetCost:
    family, config = find_preset(name)
    aliases = tuple(alias for alias, preset in family.aliases.items() if preset == name)
    with torch.device("meta"):
        model = create(name)
        if not issubclass(family.build, ImageModel):
            return PresetCost(family.name, None, sum(each.numel() for each in model.parameters()), None, aliases)
        summary = summarize(model, depth=1)
    return PresetCost(family.name, config.image_size, summary.parameters, summary.macs, aliases)


def format_costs_json(costs: dict[str, PresetCost]) -> str:
    """JSON with one line per model, which keeps diffs readable."""
    lines = [f"  {json.dumps(name)}: {json.dumps(asdict(each))}" for name, each in costs.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    COSTS_FILE.write_text(
        format_costs_json({name: compute_preset_cost(name) for name in track(list_models(), "counting")}), "utf-8"
    )
