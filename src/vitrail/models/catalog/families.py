"""Families and presets by name, and what is known about families without importing them: one name imports one family.

families.json, written by `make costs`, says by which tensors the files of each family are recognized.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.models import FAMILIES, TEXT_FAMILIES
from vitrail.models.base.contract import check_declarations
from vitrail.models.base.family import Family
from vitrail.models.catalog.external_families import UntrustedCodeError, is_external_family_name, load_external_family
from vitrail.models.catalog.preset_costs import list_presets, resolve_alias
from vitrail.models.catalog.pretrained import unknown_model_error


def build_preset(name: str, /, **fields: Any) -> Any:
    """Build a model with newly initialized weights, as `vitrail.create` does by default."""
    family, preset = find_preset(name, trusted=name)
    model = family.build(family.configure(preset, **fields))
    check_declarations(model)
    return model


def list_models(pattern: str = "*") -> list[str]:
    """Names of all presets that match by name or alias, with * and ? as in a shell.

    >>> vitrail.list_models("deit_tiny_*_224")
    ['deit_tiny_distilled_patch16_224', 'deit_tiny_patch16_224']
    """
    if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the pattern is {pattern!r}; expected a string, for example 'deit*'")
    names = [(each, name) for name, entry in list_presets().items() for each in (name, *entry["aliases"])]
    for family in load_unlisted_families():
        names += [*((name, name) for name in family.presets), *family.aliases.items()]
    return sorted({name for each, name in names if fnmatchcase(each, pattern)}, key=natural_sort_key)


def find_preset(name: str, *, trusted: str | None = None) -> tuple[Family, Any]:
    """The family and config of a name; a family outside the package is imported only if it is `trusted`."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the model name is {name!r}; expected a string, for example 'ViT-B/16'")
    if is_external_family_name(name) and name != trusted:
        raise UntrustedCodeError(name)
    if name.endswith(".py"):
        example = next(iter(load_external_family(name).presets), "preset")
        raise ConfigError(f"{name!r} has no preset; expected {name}:{example} or another of its presets")
    if ":" in name:
        module, _, preset = name.rpartition(":")
        families = [load_external_family(module)]
    else:
        preset = resolve_alias(name) or name
        entry = list_presets().get(preset)
        families = load_unlisted_families() if entry is None else [load_family(entry["family"])]
    for family in families:
        preset = family.aliases.get(preset, preset)
        if preset in family.presets:
            return family, family.presets[preset]
    if ":" not in name:
        raise unknown_model_error(preset)
    raise unknown_name_error("model", preset, [*families[0].presets, *families[0].aliases])


def load_family(name: str) -> Family:
    """A family of the package; no other one is imported."""
    room = "vitrail.models.text" if name in TEXT_FAMILIES else "vitrail.models"
    return import_module(f"{room}.{name}").FAMILY


def load_built_in_families() -> Iterator[Family]:
    """All families of the package, each imported when it is asked for."""
    return map(load_family, FAMILIES)


def load_unlisted_families() -> list[Family]:
    """The families that costs.json does not have, because they are newer than it."""
    listed = {entry["family"] for entry in list_presets().values()}
    return [load_family(name) for name in FAMILIES if name not in listed]


def find_config_family(config: object) -> Family | None:
    """The family of a config, of the package or of an imported module; its module is that of the config."""
    module = sys.modules.get(type(config).__module__)
    family = vars(module).get("FAMILY") if module else None
    return family if isinstance(family, Family) and type(config) is family.config else None


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort patch8 before patch16."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


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
    for name in FAMILIES:
        yield name, stored[name] if name in stored else describe_family(load_family(name))


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
