"""What is known about the families without importing them, so that one file or one name imports one family.

families.json, written by `make costs`, says by which tensors the files of each family are recognized.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.models.base.family import Family
from vitrail.models.catalog import families

INDEX_FILE = Path(__file__).with_name("families.json")
DETAILS = ("model_type", "other_types", "prefix", "named_as_in_timm", "own_names")  # by which layouts are recognized


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """What distinguishes the files of a name table from those of others, see `SourceNames`."""

    number: int  # among the tables of its family
    layout: str
    markers: tuple[str, ...]
    named: str
    details: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FamilyEntry:
    sources: tuple[SourceEntry, ...]
    heads: Mapping[str, int]  # of its presets, if models of other families have as many; see `list_published_heads`


def list_family_entries() -> Iterator[tuple[str, FamilyEntry]]:
    """The names and entries of all families; a family that is newer than the file is imported."""
    stored = read_index_file()
    for name in families.FAMILIES:
        yield name, stored[name] if name in stored else describe_family(families.load_family(name))


@cache
def read_index_file() -> Mapping[str, FamilyEntry]:
    return {
        name: FamilyEntry(sources=tuple(SourceEntry(**each) for each in entry["sources"]), heads=entry["heads"])
        for name, entry in json.loads(INDEX_FILE.read_text("utf-8")).items()
    }


def describe_family(family: Family) -> FamilyEntry:
    sources = tuple(
        SourceEntry(
            number=number,
            layout=each.layout,
            markers=each.markers,
            named=each.named,
            details={name: each.details[name] for name in DETAILS if name in each.details},
        )
        for number, each in enumerate(family.checkpoint.sources)
    )
    return FamilyEntry(sources=sources, heads=list_published_heads(family) if family.checkpoint.heads_by_width else {})


def list_published_heads(family: Family) -> dict[str, int]:
    """Attention heads by "WIDTH MLP_WIDTH", of the first preset that has these."""
    heads = dict[str, int]()
    for preset in map(asdict, family.presets.values()):
        hidden = preset.get("mlp_width") or family.checkpoint.mlp_ratio * preset["width"]
        heads.setdefault(f"{preset['width']} {hidden}", preset["heads"])
    return heads
