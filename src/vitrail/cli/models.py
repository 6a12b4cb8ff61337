"""vitrail models: list the presets. Reads their costs from a file, so torch is not imported."""

import json
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import TypedDict

from vitrail.cli.options import model_flags as flags
from vitrail.errors import unknown_name_error
from vitrail.text import format_table


class ModelListing(TypedDict):
    family: str
    image_size: list[int]
    parameters: int
    macs: int
    aliases: list[str]


def models(pattern: str = "*", /, *, as_json: flags.Json = False) -> None:
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
        Names or aliases to list, with * and ? as in a shell (quote it), or a part of a name.
    """
    catalog: dict[str, ModelListing] = json.loads(files("vitrail.models").joinpath("costs.json").read_text("utf-8"))
    found = filter_models(catalog, pattern) or filter_models(catalog, f"*{pattern}*")
    if not found:
        aliases = (alias for entry in catalog.values() for alias in entry["aliases"])
        raise unknown_name_error("model", pattern, [*catalog, *aliases])
    if as_json:
        print(json.dumps(found, indent=2))
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
    print("\n".join(format_table(("model", "parameters", "GMACs", "resolution", "also"), lines, "lrrrl")))


def filter_models(catalog: dict[str, ModelListing], pattern: str) -> dict[str, ModelListing]:
    return {
        name: entry
        for name, entry in catalog.items()
        if any(fnmatchcase(known, pattern) for known in (name, *entry["aliases"]))
    }
