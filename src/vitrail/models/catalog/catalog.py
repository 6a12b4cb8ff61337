"""Models by name: the presets of all families, their aliases, and families outside the package."""

import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.base.files import check_regular_file
from vitrail.models import FAMILIES, TEXT_FAMILIES
from vitrail.models.base.contract import check_declarations
from vitrail.models.base.family import Family
from vitrail.models.catalog.preset_list import list_presets, resolve_alias
from vitrail.models.catalog.pretrained import unknown_model_error


def create(name: str, /, **fields: Any) -> Any:
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


def is_external_family_name(name: object) -> bool:
    """Whether a name refers to a family outside the package, whose code must be imported."""
    return isinstance(name, str) and (":" in name or name.endswith(".py"))


class UntrustedCodeError(ConfigError):
    """A file names code that the user has not named in this call."""

    def __init__(self, name: str, where: str = "a file") -> None:
        place = name.rpartition(":")[0] or name
        kind = "file" if place.endswith(".py") else "module"
        super().__init__(
            f"{where} names the model {name!r}, which runs the code of the {kind} {place}; code is run only if you "
            f"name it: if you trust it, add `trust_code` {quote(name)}",
            fields=("trust_code",),
        )


def resolve_external_name(name: str) -> str:
    """The name of an external family, valid in any working directory: a file gets its full path."""
    place, _, preset = name.rpartition(":")
    return f"{Path(place).resolve()}:{preset}" if place.endswith(".py") else name


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
    """The family of the package that a config belongs to; its module is that of the config."""
    name = type(config).__module__.rpartition(".")[2]
    family = load_family(name) if name in FAMILIES else None
    return family if family is not None and type(config) is family.config else None


def load_external_family(place: str) -> Family:
    """The FAMILY of a module outside the package, by import path or file."""
    try:
        module = import_file(Path(place)) if place.endswith(".py") else import_external_module(place)
    except Exception as error:  # foreign code may raise anything when it is imported
        raise ConfigError(
            f"cannot import the family {place!r}: {type(error).__name__}: {error}; expected a module or a .py file"
        ) from error
    family = getattr(module, "FAMILY", None)  # the user's module may lack it
    if not isinstance(family, Family):
        raise ConfigError(f"{place!r} has no FAMILY; expected FAMILY = vitrail.models.base.family.Family(…) at its end")
    return family


def import_external_module(name: str) -> ModuleType:
    """Import a module by its path, also from the working directory, which is not added to sys.path."""
    top = name.partition(".")[0]
    if top and top not in sys.modules and find_spec(top) is None:
        spec = PathFinder.find_spec(top, [str(Path.cwd())])
        if spec is not None:
            execute_module(top, spec)
    return import_module(name)


def import_file(path: Path) -> ModuleType:
    """Import a file once; its name in sys.modules is its path, so that it never hides another module."""
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    check_regular_file(path.stat())
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    return execute_module(name, spec)


def execute_module(name: str, spec: ModuleSpec) -> ModuleType:
    """Run a module; if it fails, it is removed from sys.modules."""
    sys.modules[name] = module = module_from_spec(spec)
    try:
        if spec.loader is not None:  # a namespace package has no loader
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort patch8 before patch16."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
