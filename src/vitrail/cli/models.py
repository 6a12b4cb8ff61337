"""vitrail models: what there is to build. Reads the catalog, so torch is not imported."""

import json as jsonlib
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import TypedDict

from vitrail.errors import unknown
from vitrail.tables import text_table


class Entry(TypedDict):
    family: str
    image_size: list[int]
    parameters: int
    macs: int
    aliases: list[str]


def models(pattern: str = "*", /, *, json: bool = False) -> None:
    """List the models: name, parameters, GMACs, resolution.

    GMACs are the multiply-adds of convolutions, matrix products and attention for one image.

    Examples::

        vitrail models
        vitrail models 'deit*'
        vitrail models '*_384'
        vitrail models 'ViT-B/*'

    Parameters
    ----------
    pattern
        Names to list, with * and ? as in a shell (quote it). Aliases such as ViT-B/16 are matched too.
    json
        Print JSON instead of a table.
    """
    catalog: dict[str, Entry] = jsonlib.loads(files("vitrail.models").joinpath("catalog.json").read_text("utf-8"))
    found = {
        name: entry
        for name, entry in catalog.items()
        if any(fnmatchcase(known, pattern) for known in (name, *entry["aliases"]))
    }
    if not found:
        raise unknown(
            "model", pattern, [*catalog, *(alias for entry in catalog.values() for alias in entry["aliases"])]
        )
    if json:
        print(jsonlib.dumps(found, indent=2))
        return
    lines = [
        (
            name,
            f"{entry['parameters']:,}",
            f"{entry['macs'] / 1e9:,.3f}",
            "×".join(map(str, entry["image_size"])),
            ", ".join(entry["aliases"]),
        )
        for name, entry in found.items()
    ]
    print("\n".join(text_table(("model", "parameters", "GMACs", "pixels", "also"), lines, "lrrrl")))
