"""The presets with their costs and aliases, read from a file: torch is not imported."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict

from vitrail.base.text import make_unique_path_ends

COSTS_FILE = Path(__file__).with_name("costs.json")


class PresetListing(TypedDict):
    family: str
    image_size: list[int] | None  # None: it reads text
    parameters: int
    macs: int | None  # for one image
    aliases: list[str]


@cache
def list_presets() -> Mapping[str, PresetListing]:
    return json.loads(COSTS_FILE.read_text("utf-8"))


def resolve_alias(name: str) -> str | None:
    """The preset of this name or alias; None if there is none."""
    known = list_presets()
    return name if name in known else next((key for key, each in known.items() if name in each["aliases"]), None)


def shorten_model_names(names: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """The shortest unique end of each path, for a table; an alias such as ViT-B/16 is not a path."""
    paths = [name.replace("/", "\0") if resolve_alias(name) else name for name in names]
    return [path.replace("\0", "/") for path in make_unique_path_ends(paths, taken)]
