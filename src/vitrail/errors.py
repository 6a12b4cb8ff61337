"""What can go wrong through a user's hand. Each message says what was given, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class VitrailError(Exception):
    """Base of every error a user can fix; the command line prints its one line and exits with 2."""


class ConfigError(VitrailError):
    """A model name, a configuration field, a value or an input shape that does not fit."""


def unknown(what: str, given: object, known: Iterable[str]) -> ConfigError:
    """An unknown name, with the nearest valid one: unknown model 'vit_b61'; did you mean 'vit_b16'?"""
    names = list(known)
    lowered = {name.lower(): name for name in names}
    near = get_close_matches(str(given).lower(), lowered, n=1, cutoff=0.5)
    if near:
        return ConfigError(f"unknown {what} {given!r}; did you mean {lowered[near[0]]!r}?")
    listed = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:5])}, … ({len(names)} in all)"
    return ConfigError(f"unknown {what} {given!r}; expected one of {listed}")
