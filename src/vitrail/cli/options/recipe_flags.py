"""Recipe settings as command line flags of the same names."""

from collections.abc import Iterable
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from vitrail.train.recipe import SECTIONS, list_settings

SECTION_GROUPS = {
    "loop": Group("Training length and batches (default: the recipe)", sort_key=1),
    "optimization": Group("Optimizer (default: the recipe)", sort_key=2),
    "augmentation": Group("Augmentation and mixing (default: the recipe)", sort_key=3),
    "distillation": Group("Distillation (default: the recipe)", sort_key=0),
}


def make_flags_class(sections: Iterable[str]) -> Any:
    """A dataclass of all settings in these sections, each None by default."""
    found = list[tuple[str, Any, Any]]()
    for section, each in list_settings(sections):
        hint = get_type_hints(SECTIONS[section])[each.name]
        hint = tuple[float, float] if hint == tuple[float, ...] else hint
        negative = f"--no-{each.name}" if hint is bool else ()
        how = Parameter(help=each.metadata["help"], group=SECTION_GROUPS[section], negative=negative)
        found.append((each.name, Annotated[hint | None, how], None))
    made = make_dataclass("Settings", found, kw_only=True)
    made.__module__ = __name__
    return made


if TYPE_CHECKING:

    class RecipeFlags: ...

    class DistillRecipeFlags: ...

else:
    RecipeFlags = make_flags_class(section for section in SECTIONS if section != "distillation")
    DistillRecipeFlags = make_flags_class(SECTIONS)


def collect_given_flags(values: object) -> dict[str, Any]:
    """The settings given on the command line."""
    return {name: value for name, value in vars(values or object).items() if value is not None and name[0] != "_"}
