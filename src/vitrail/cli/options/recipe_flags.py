"""Recipe settings as command line flags of the same names."""

from collections.abc import Iterable, Sequence
from dataclasses import make_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from cyclopts import Parameter, Token, convert
from cyclopts.exceptions import CoercionError

from vitrail.cli.options.groups import AUGMENTATION, COMMON, DISTILLATION, LOOP, OPTIMIZER, SPEED
from vitrail.recipes.recipe import SECTIONS, list_settings, open_recipe

SECTION_GROUPS = {"loop": LOOP, "optimization": OPTIMIZER, "augmentation": AUGMENTATION, "distillation": DISTILLATION}
SETTING_GROUPS = {
    **dict.fromkeys(("epochs", "minutes", "batch", "lr", "seed"), COMMON),
    **dict.fromkeys(("accumulate", "precision", "compile"), SPEED),
}
SHOWN_RECIPE = "fashion"  # the help shows its values: it is the default recipe without options


def make_flags_class(sections: Iterable[str]) -> Any:
    """A dataclass of all settings in these sections, each None by default."""
    found = list[tuple[str, Any, Any]]()
    for section, each in list_settings(sections):
        hint = get_type_hints(SECTIONS[section])[each.name]
        hint = tuple[float, float] if hint == tuple[float, ...] else hint
        how = Parameter(
            help=each.metadata["help"],
            group=SETTING_GROUPS.get(each.name, SECTION_GROUPS[section]),
            negative=f"--no-{each.name.replace('_', '-')}" if hint is bool else (),
            converter=convert_whole_number if int in (hint, *get_args(hint)) else None,
            show_default=partial(describe_recipe_value, each.name),
        )
        found.append((each.name, Annotated[hint | None, how], None))
    made = make_dataclass("Settings", found, kw_only=True)
    made.__module__ = __name__
    return made


def convert_whole_number(hint: Any, tokens: Sequence[Token]) -> Any:
    """Refuse 2.5, which cyclopts would round."""
    if "." in tokens[0].value:
        raise CoercionError(token=tokens[0], target_type=int)
    return convert(hint, tokens)


def describe_recipe_value(name: str, _: object) -> str:
    """The value of a setting in the default recipe, for the help."""
    value = read_shown_recipe()[name]
    if isinstance(value, bool):
        return f"recipe: {'on' if value else 'off'}"
    values = value if isinstance(value, tuple | list) else (value,)
    return f"recipe: {' '.join(f'{each:g}' if isinstance(each, float) else str(each).lower() for each in values)}"


@cache
def read_shown_recipe() -> dict[str, Any]:
    return open_recipe(SHOWN_RECIPE).to_flat_dict()


if TYPE_CHECKING:

    class RecipeFlags: ...

    class DistillRecipeFlags: ...

else:
    RecipeFlags = make_flags_class(section for section in SECTIONS if section != "distillation")
    DistillRecipeFlags = make_flags_class(SECTIONS)


def collect_given_flags(values: object) -> dict[str, Any]:
    """The settings given on the command line."""
    return {name: value for name, value in vars(values or object).items() if value is not None and name[0] != "_"}
