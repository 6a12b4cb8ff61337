"""Recipe settings as command line flags of the same names."""

from collections.abc import Collection, Sequence
from dataclasses import Field, fields, make_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from cyclopts import Group, Parameter, Token, convert
from cyclopts.exceptions import CoercionError

from vitrail.base.errors import ConfigError
from vitrail.cli.options.values import convert_dtype
from vitrail.cli.output.help_text import (
    AUGMENTATION,
    CAPTIONS,
    COMMON,
    DISTILLATION,
    LOOP,
    OPTIMIZER,
    SPEED,
    TASK,
    TRANSLATION,
)
from vitrail.recipes.recipe import SECTIONS, list_settings, open_recipe
from vitrail.recipes.schedule import Schedule, parse_schedule
from vitrail.recipes.task_settings import SETTINGS, TASKS_WITH_VIEWS, CaptionSettings, TranslationSettings

SECTION_GROUPS = {"loop": LOOP, "optimization": OPTIMIZER, "augmentation": AUGMENTATION, "distillation": DISTILLATION}
SETTING_GROUPS = {
    **dict.fromkeys(("epochs", "minutes", "batch", "lr", "seed"), COMMON),
    **dict.fromkeys(("accumulate", "precision", "compile"), SPEED),
}
SHOWN_RECIPE = "fashion"  # the help shows its values: it is the default recipe without options
# the same for the settings of tasks on text; those of the same name are listed once
TEXT_FLAGS = {
    "translation": (TranslationSettings, TRANSLATION, "translate-cpu"),
    "caption": (CaptionSettings, CAPTIONS, "caption-cpu"),
}
TASK_SETTINGS = {**SETTINGS, **{task: settings for task, (settings, *_) in TEXT_FLAGS.items()}}
LABEL_SETTINGS = ("mixup", "cutmix", "smoothing", "erase", "early_size", "early_share")  # of classification only


def make_flags_class(sections: Collection[str], task: str | None = None, *, text: bool = False) -> Any:
    """A dataclass of all settings in these sections, and of a task without labels or of those on text, each None by
    default.
    """
    found = list[tuple[str, Any, Any]]()
    for settings, group, shown in TEXT_FLAGS.values() if text else ():
        known, hints = [name for name, *_ in found], get_type_hints(settings)
        found += [
            make_flag(each, hints[each.name], group, shown) for each in fields(settings) if each.name not in known
        ]
    own = {} if task is None else {each.name: each for each in fields(SETTINGS[task])}
    recipe = SHOWN_RECIPE if task is None else f"{task}-cpu"
    if task is not None:
        hints = get_type_hints(SETTINGS[task])
        found += [make_flag(each, hints[each.name], TASK, recipe) for each in own.values()]
    for section, each in list_settings(sections):
        if each.name not in own and not (task and each.name in LABEL_SETTINGS):
            group = SETTING_GROUPS.get(each.name, SECTION_GROUPS[section])
            found.append(make_flag(each, get_type_hints(SECTIONS[section])[each.name], group, recipe))
    made = make_dataclass("Settings", found, kw_only=True)
    made.__module__ = __name__
    return made


def make_flag(setting: Field[Any], hint: Any, group: Group, recipe: str) -> tuple[str, Any, Any]:
    """Name, type and default of a flag."""
    hint = tuple[float, float] if hint == tuple[float, ...] else hint
    scheduled = hint is Schedule
    whole_number = convert_whole_number if int in (hint, *get_args(hint)) else None
    how = Parameter(
        help=setting.metadata["help"] + " START:END changes it during the run." * scheduled,
        group=group,
        negative=f"--no-{setting.name.replace('_', '-')}" if hint is bool else (),
        converter=convert_dtype if setting.name == "precision" else whole_number,
        show_default=partial(describe_recipe_value, recipe, setting.name),
    )
    return setting.name, Annotated[(str if scheduled else hint) | None, how], None


def convert_whole_number(hint: Any, tokens: Sequence[Token]) -> Any:
    """Refuse 2.5, which cyclopts would round."""
    if "." in tokens[0].value:
        raise CoercionError(token=tokens[0], target_type=int)
    return convert(hint, tokens)


def describe_recipe_value(recipe: str, name: str, _: object) -> str:
    """The value of a setting in the default recipe, for the help."""
    value = read_shown_values(recipe)[name]
    if isinstance(value, bool):
        return f"recipe: {'on' if value else 'off'}"
    if isinstance(value, Schedule):
        return f"recipe: {value.start:g}{'' if value.end is None else f':{value.end:g}'}"
    values = value if isinstance(value, tuple | list) else (value,)
    return f"recipe: {' '.join(f'{each:g}' if isinstance(each, float) else str(each).lower() for each in values)}"


@cache
def read_shown_values(recipe: str) -> dict[str, Any]:
    """All settings of a recipe by flat name, those of its task too."""
    opened = open_recipe(recipe)
    settings = TASK_SETTINGS.get(opened.task.get("name", ""))
    if settings is None:
        return opened.to_flat_dict()
    hints = get_type_hints(settings)
    task = {each.name: opened.task.get(each.name, each.default) for each in fields(settings)}
    schedules = {name: parse_schedule(value, name) for name, value in task.items() if hints[name] is Schedule}
    return opened.to_flat_dict() | task | schedules


if TYPE_CHECKING:

    class RecipeFlags: ...

    class TrainRecipeFlags: ...

    class DistillRecipeFlags: ...

else:
    RecipeFlags = make_flags_class([section for section in SECTIONS if section != "distillation"])
    TrainRecipeFlags = make_flags_class([section for section in SECTIONS if section != "distillation"], text=True)
    DistillRecipeFlags = make_flags_class(SECTIONS)


@cache
def make_pretraining_flags_class(task: str) -> Any:
    """The flags of `vitrail pretrain TASK`; a task that makes views of its own does not use the augmentation."""
    unused = ("distillation", *["augmentation"] * (task in TASKS_WITH_VIEWS))
    return make_flags_class([section for section in SECTIONS if section not in unused], task)


def collect_given_flags(values: object, task: str | None = None) -> dict[str, Any]:
    """The settings given on the command line, as `Recipe.with_settings` takes them."""
    given = {name: value for name, value in vars(values or object).items() if value is not None and name[0] != "_"}
    if task is None:
        names = [each.name for settings, *_ in TEXT_FLAGS.values() for each in fields(settings)]
        own = {name: given.pop(name) for name in names if name in given}
        return {**given, "task": own} if own else given
    hints = get_type_hints(SETTINGS[task])
    own = {name: given.pop(name) for name in hints if name in given}
    for name, value in own.items():
        own[name] = parse_schedule_flag(name, value) if hints[name] is Schedule else value
    return {**given, "task": {"name": task, **own}}


def parse_schedule_flag(name: str, text: str) -> float | dict[str, float]:
    """A number, or START:END."""
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2:
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} {text!r}; expected a number, or START:END such as 0.99:1")
    return values[0] if len(values) == 1 else {"start": values[0], "end": values[1]}
