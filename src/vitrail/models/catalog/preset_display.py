"""What `vitrail models` shows: the presets with their costs and public weights. torch is not imported."""

from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.base.text import TableCells
from vitrail.models.catalog.preset_costs import list_presets
from vitrail.models.catalog.pretrained import (
    PretrainedWeights,
    find_nearest_preset_with_weights,
    list_weights_of_preset,
    unknown_model_error,
)


def find_presets(pattern: str, *, pretrained: bool = False) -> list[str]:
    """The presets whose name or an alias matches the pattern, or else contains it; or only those with weights."""
    found = filter_presets(pattern) or filter_presets(f"*{pattern}*")
    if not found and set("*?[") & set(pattern):
        raise ConfigError(f"no model matches {pattern!r}; `vitrail models` lists all names")
    if not found:
        raise unknown_model_error(pattern)
    kept = [name for name in found if not pretrained or list_weights_of_preset(name)]
    if not kept:
        nearest = find_nearest_preset_with_weights(found[0])
        hint = (
            "only models that read images have some" if nearest is None else f"the nearest that has some is {nearest}"
        )
        raise ConfigError(f"no model that matches {pattern!r} has public weights; {hint}")
    return kept


def filter_presets(pattern: str) -> list[str]:
    return [
        name
        for name, entry in list_presets().items()
        if any(fnmatchcase(known, pattern) for known in (name, *entry["aliases"]))
    ]


def describe_presets(names: list[str], speeds: Mapping[str, float] | None = None) -> dict[str, dict[str, Any]]:
    """Costs, aliases, all public weights and the measured images per second of each preset, for JSON."""
    return {
        name: {
            **list_presets()[name],
            "weights": [{"name": each.name, **asdict(each)} for each in list_weights_of_preset(name)],
            **({} if speeds is None else {"images_per_second": speeds.get(name)}),
        }
        for name in names
    }


def list_preset_cells(names: list[str]) -> TableCells:
    """The cells of a table with one row per preset; its weights are the default ones."""
    rows = list[tuple[str, ...]]()
    for name in names:
        entry, weights = list_presets()[name], list_weights_of_preset(name)
        rows.append(
            (
                name,
                f"{entry['parameters']:,}",
                "" if entry["macs"] is None else f"{entry['macs'] / 1e9:,.3f}",
                "text" if entry["image_size"] is None else "×".join(map(str, entry["image_size"])),
                *((weights[0].tag, format_top1(weights[0])) if weights else ("", "")),
                ", ".join(entry["aliases"]),
            )
        )
    return ("model", "parameters", "GMACs", "resolution", "weights", "top-1", "also"), rows, "lrrrlrl"


def list_comparison_cells(names: list[str], speeds: Mapping[str, float] | None = None) -> TableCells:
    """The cells of a table that compares presets, from the cheapest to the most expensive; text models come first."""
    rows = list[tuple[str, ...]]()
    for name in sorted(names, key=lambda each: list_presets()[each]["macs"] or 0):
        entry, weights = list_presets()[name], list_weights_of_preset(name)
        row = (
            name,
            entry["family"],
            f"{entry['parameters'] / 1e6:,.1f} M",
            "" if entry["macs"] is None else f"{entry['macs'] / 1e9:,.2f}",
            *((format_top1(weights[0]), weights[0].license) if weights else ("", "")),
        )
        rows.append(row if speeds is None else (*row, f"{speeds[name]:,.1f}" if name in speeds else ""))
    heading = ("model", "family", "parameters", "GMACs", "top-1", "license")
    return (heading, rows, "llrrrl") if speeds is None else ((*heading, "images/s"), rows, "llrrrlr")


def format_top1(weights: PretrainedWeights) -> str:
    """Per cent, with the image size if it was not measured at that of the model."""
    if weights.top1 is None:
        return "" if weights.classes else "features"
    return f"{weights.top1:.1f}" + (f" @{weights.top1_size}" if weights.top1_size != weights.image_size else "")
