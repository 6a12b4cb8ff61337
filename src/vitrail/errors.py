"""Errors that a user can fix. Each message says what was given, what was expected and what to do."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class VitrailError(Exception):
    """Base of every error a user can fix; the command line prints its one line and exits with 2."""


class ConfigError(VitrailError):
    """A model name, a configuration field, a value or an input shape that does not fit."""


class CheckpointError(VitrailError):
    """A checkpoint that cannot be read or written, or does not fit."""


class DataError(VitrailError):
    """A picture or a data set that cannot be read."""


def unknown(what: str, given: object, known: Iterable[str], also: Mapping[str, str] | None = None) -> ConfigError:
    """An unknown name, with the nearest valid one; `also` holds other words for the known names."""
    names = list(known)
    near = (also or {}).get(str(given))
    if near not in names:
        lowered = {name.lower(): name for name in names}
        near = next((lowered[name] for name in get_close_matches(str(given).lower(), lowered, n=1, cutoff=0.5)), None)
    if near:
        return ConfigError(f"unknown {what} {given!r}; did you mean {near!r}?")
    listed = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:5])} and {len(names) - 5} more"
    return ConfigError(f"unknown {what} {given!r}; expected one of {listed}")
