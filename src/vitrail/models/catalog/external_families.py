"""Families outside the package: code of the user, imported only if the user names it."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from shlex import quote
from types import ModuleType

from vitrail.base.errors import ConfigError
from vitrail.base.files import check_regular_file
from vitrail.models.base.family import Family

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


def load_external_family(place: str) -> Family:
    """The FAMILY of a module outside the package, by import path or file."""
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
