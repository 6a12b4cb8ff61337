"""Every setting of a recipe as a flag of its own, under its own name."""

from collections.abc import Iterable
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from vitrail.train.recipe import SECTIONS, settings

HEADINGS = {
    "loop": Group("Length and portions (else the recipe's)", sort_key=1),
    "optimization": Group("Optimizer (else the recipe's)", sort_key=2),
    "augmentation": Group("Augmentation and mixing (else the recipe's)", sort_key=3),
    "distillation": Group("Distillation (else the recipe's)", sort_key=0),
}


def flags(sections: Iterable[str]) -> Any:
    """A class of all settings in these sections, none of them given."""
    found = list[tuple[str, Any, Any]]()
    for section, each in settings(sections):
        hint = get_type_hints(SECTIONS[section])[each.name]
        hint = tuple[float, float] if hint == tuple[float, ...] else hint
        negative = f"--no-{each.name}" if hint is bool else ()
        how = Parameter(help=each.metadata["help"], group=HEADINGS[section], negative=negative)
        found.append((each.name, Annotated[hint | None, how], None))
    made = make_dataclass("Settings", found, kw_only=True)
    made.__module__ = __name__
    return made


if TYPE_CHECKING:

    class Settings: ...

    class DistillSettings: ...

else:
    Settings = flags(section for section in SECTIONS if section != "distillation")
    DistillSettings = flags(SECTIONS)


def given(values: object) -> dict[str, Any]:
    """The settings that stand on the command line."""
    return {name: value for name, value in vars(values or object).items() if value is not None and name[0] != "_"}
