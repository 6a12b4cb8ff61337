"""Families outside the package: code of the user, imported only if the user names it."""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import CheckpointError, ConfigError, unknown_name_error
from vitrail.base.files import check_regular_file
from vitrail.models import FAMILIES

if TYPE_CHECKING:
    from vitrail.models.base.family import Family

TRUSTED: ContextVar[tuple[str, ...]] = ContextVar("TRUSTED", default=())  # code that the user has named in this call
TIMM_PREFIX = "timm:"  # models of timm, which are not families

MOVED_MODULES = {  # that files written for earlier versions import
    "vitrail.errors": "vitrail.base.errors",
    **{
        f"vitrail.models.{name}": f"vitrail.models.base.{name}"
        for name in ("checkpoint_side", "checks", "contract", "family", "init", "text_contract")
    },
    "vitrail.models.name_entries": "vitrail.models.base.checkpoint_side",
    "vitrail.models.parts.tensor_shapes": "vitrail.models.base.checkpoint_side",
    **{
        f"vitrail.models.parts.{name}": "vitrail.models.parts.encoder"
        for name in ("blocks", "config_fields", "head", "prefix")
    },
    "vitrail.models.parts.reduced_attention": "vitrail.models.parts.attention",
}


def is_external_family_name(name: object) -> bool:
    """Whether a name refers to a family outside the package, whose code must be imported."""
    return isinstance(name, str) and (":" in name or name.endswith(".py"))


@contextmanager
def trust(names: str | Iterable[str]) -> Generator[None]:
    """Let the models that are opened meanwhile use these families: FILE.py:PRESET or MODULE:PRESET."""
    given = (names,) if isinstance(names, str) else tuple(names)
    for name in given:
        if not (isinstance(name, str) and ":" in name.strip(":")):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"`trust_code` {name}; expected FILE.py:NAME or MODULE:NAME")
    token = TRUSTED.set((*TRUSTED.get(), *given))
    try:
        yield
    finally:
        TRUSTED.reset(token)


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


def find_trusted_family(name: str, code: str | None, where: str) -> "Family":
    """The family of a checkpoint among those that the user trusts; `code`, recorded in the checkpoint, is only shown.

    A file may have moved: what counts is the name of its family.
    """
    trusted = [each for each in TRUSTED.get() if not each.startswith(TIMM_PREFIX)]
    if not trusted and code is not None:
        raise UntrustedCodeError(code, where)
    if not trusted:
        raise CheckpointError(
            f"{where}: {unknown_name_error('family', name, FAMILIES)} (one from outside the package "
            "needs `trust_code` FILE.py:NAME, or family=… in Python)"
        )
    found = dict[str, str]()
    for each in trusted:
        place, _, preset = each.rpartition(":")
        family = load_external_family(place)
        if family.name == name:
            check_has_preset(family, preset)
            return family
        found[each] = family.name
    given = ", ".join(f"{each} of the family {family}" for each, family in found.items())
    expected = f"{code}, or where this file is now" if code else f"the file of {name}"
    raise ConfigError(f"{where} has a model of the family {name!r}, but `trust_code` is {given}; expected {expected}")


def check_has_preset(family: "Family", preset: str) -> None:
    if preset not in family.presets and preset not in family.aliases:
        raise unknown_name_error("model", preset, [*family.presets, *family.aliases])


def is_external_family(family: "Family") -> bool:
    return not family.build.__module__.startswith("vitrail.models.")


def describe_code(family: "Family", config: Any) -> str | None:
    """FILE.py:PRESET or MODULE:PRESET of a family outside the package, by its nearest preset; None for all others."""
    if not is_external_family(family):
        return None
    modules = {name: sys.modules.get(name) for name in (family.build.__module__, family.config.__module__)}
    name = next((name for name, module in modules.items() if module and vars(module).get("FAMILY") is family), None)
    if name is None or not family.presets:
        return None
    fields, presets = asdict(config), {name: asdict(preset) for name, preset in family.presets.items()}
    nearest = max(presets, key=lambda each: sum(fields[field] == value for field, value in presets[each].items()))
    place = vars(sys.modules[name]).get("__file__") if name == "__main__" else name
    code = place and resolve_external_name(f"{place}:{nearest}")
    return code if code and code.isprintable() else None


def load_external_family(place: str) -> "Family":
    """The FAMILY of a module outside the package, by import path or file."""
    from vitrail.models.base.family import Family  # which needs torch

    try:
        module = import_file(Path(place)) if place.endswith(".py") else import_external_module(place)
    except Exception as error:  # foreign code may raise anything when it is imported
        if isinstance(error, ModuleNotFoundError) and error.name in MOVED_MODULES:
            raise ConfigError(f"{place} imports {error.name}, which is now {MOVED_MODULES[error.name]}") from error
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
