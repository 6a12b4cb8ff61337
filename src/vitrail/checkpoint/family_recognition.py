"""Find the family of a file by the names of its tensors and its fixed positions, and its name table in a layout."""

from collections.abc import Collection
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.text import abbreviate_list
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.name_table import PLACEHOLDER, compile_name_pattern
from vitrail.models.base.checkpoint_side import SourceNames
from vitrail.models.base.family import Family
from vitrail.models.catalog import families
from vitrail.models.catalog.external_families import find_trusted_family
from vitrail.models.catalog.families import SourceEntry, list_family_entries

FamilySource = tuple[Family, SourceNames]
FoundSource = tuple[str, SourceEntry]  # the name of a family that is not imported yet
TABLE_TOLERANCE = 1e-3  # tables may be stored in half precision


def get_family(about: Description, where: str) -> Family:
    """The family of a checkpoint; one from outside the package is imported only if the user trusts its code."""
    if about.code is None and about.family in families.FAMILIES:
        return families.load_family(about.family)
    return find_trusted_family(about.family, about.code, where)


def list_sources(layout: str) -> list[FoundSource]:
    """The name tables of all families in a layout."""
    return [(name, each) for name, entry in list_family_entries() for each in entry.sources if each.layout == layout]


def load_source(found: FoundSource) -> FamilySource:
    """Import the family of a name table."""
    name, entry = found
    family = families.load_family(name)
    return family, family.checkpoint.sources[entry.number]


def has_layout(family: Family, layout: str) -> bool:
    return any(each.layout == layout for each in family.checkpoint.sources)


def is_timm_family_unknown_to(layout: str, names: Collection[str]) -> bool:
    """Whether tensors have timm's names, those of a family that this layout does not have: a hybrid, a Swin, a BEiT."""
    found = recognize_source("timm", names)
    return found is not None and all(name != found[0] for name, _ in list_sources(layout))


def recognize_source(layout: str, names: Collection[str], model_name: str = "") -> FoundSource | None:
    """The name table of a file, by the names of its tensors and the name of its model; None if none fits.

    No family is imported.
    """

    def rank(source: SourceEntry) -> tuple[int, bool]:
        fits = all(contains_marker(names, each) for each in source.markers) and model_name.startswith(source.named)
        return (len(source.markers), bool(source.named)) if fits else (0, False)

    best = max(list_sources(layout), key=lambda each: rank(each[1]), default=None)
    return best if best is not None and rank(best[1])[0] else None


def contains_marker(names: Collection[str], marker: str) -> bool:
    """Whether one of the names is the marker; a marker that ends with a dot is the beginning of a name."""
    if marker.endswith("."):
        return any(name.startswith(marker) for name in names)
    if PLACEHOLDER.search(marker):
        return any(map(compile_name_pattern(marker).fullmatch, names))
    return marker in names


def find_source(layout: str, names: Collection[str], model_name: str = "") -> FamilySource | None:
    """As `recognize_source`, with the family imported."""
    found = recognize_source(layout, names, model_name)
    return None if found is None else load_source(found)


def get_source(layout: str, names: Collection[str], where: object) -> FamilySource:
    """As `find_source`, but an error if no family has these tensors."""
    found = find_source(layout, names)
    if found is None:
        raise wrong_layout_error(layout, names, where)
    return found


def wrong_layout_error(layout: str, names: Collection[str], where: object) -> CheckpointError:
    return CheckpointError(
        f"{where} has {len(names)} tensors ({abbreviate_list(list(names), 3)}), which are not those of a model of the "
        f"layout {layout}; expected another `source`"
    )


def choose_source(layout: str, description: Description) -> FamilySource:
    """The family of a model, and the name table to write it in this layout."""
    family = get_family(description, "the model")
    sources = (each for each in family.checkpoint.sources if each.layout == layout)
    return family, next(each for each in sources if each.accepts(description.config))


def get_field_defaults(family: Family) -> dict[str, Any]:
    """Fields of a family's config with their defaults."""
    return {name: each.default for name, each in family.config.__dataclass_fields__.items()}


def make_sincos_table(side: int, width: int, *, columns_first: bool) -> Tensor:
    """Sines and cosines of one axis, then of the other, after a zero row for the class token: (1, 1 + side², D).

    MAE puts the columns first, MoCo v3 the rows.
    """
    rates = 1 / 10_000 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates
    axis = torch.cat((angles.sin(), angles.cos()), dim=1)
    rows, columns = axis.repeat_interleave(side, dim=0), axis.repeat(side, 1)
    patches = torch.cat((columns, rows) if columns_first else (rows, columns), dim=1)
    return torch.cat((torch.zeros(1, patches.shape[1]), patches))[None]


def is_sincos_table(table: Tensor | None, *, columns_first: bool) -> bool:
    """Whether this is the table for a square of at least 2×2 patches."""
    if table is None or table.ndim != 3 or table.shape[0] != 1 or not table.is_floating_point() or table.is_meta:
        return False
    side, width = isqrt(max(table.shape[1] - 1, 0)), table.shape[2]
    if side < 2 or side * side + 1 != table.shape[1] or width % 4 or not width:
        return False
    return torch.allclose(
        table.float(), make_sincos_table(side, width, columns_first=columns_first), rtol=0, atol=TABLE_TOLERANCE
    )
