"""The presets with their costs, read from a file: torch is not imported."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

from vitrail.errors import unknown_name_error
from vitrail.text import TableCells

COSTS_FILE = Path(__file__).with_name("costs.json")


class PresetListing(TypedDict):
    family: str
    image_size: list[int]
    parameters: int
    macs: int
    aliases: list[str]


def find_presets(pattern: str) -> dict[str, PresetListing]:
    """The presets whose name or an alias matches the pattern, or else contains it."""
    known: dict[str, PresetListing] = json.loads(COSTS_FILE.read_text("utf-8"))
    found = filter_presets(known, pattern) or filter_presets(known, f"*{pattern}*")
    if not found:
        aliases = (alias for entry in known.values() for alias in entry["aliases"])
        raise unknown_name_error("model", pattern, [*known, *aliases])
    return found


def filter_presets(presets: Mapping[str, PresetListing], pattern: str) -> dict[str, PresetListing]:
    return {
        name: entry
        for name, entry in presets.items()
        if any(fnmatchcase(known, pattern) for known in (name, *entry["aliases"]))
    }


def list_preset_cells(presets: Mapping[str, PresetListing]) -> TableCells:
    """The cells of a table with one row per preset."""
    rows = [
        (
            name,
            f"{entry['parameters']:,}",
            f"{entry['macs'] / 1e9:,.3f}",
            "×".join(map(str, entry["image_size"])),
            ", ".join(entry["aliases"]),
        )
        for name, entry in presets.items()
    ]
    return ("model", "parameters", "GMACs", "resolution", "also"), rows, "lrrrl"
