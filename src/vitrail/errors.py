"""Errors that a user can fix. Each message says what was given, what was expected and what to do."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

LONGEST = 2000  # characters of a message


class VitrailError(Exception):
    """Base of every error a user can fix; the command line prints its one line and exits with 2."""

    def __init__(self, message: str) -> None:
        """Names out of a file may hold anything: what is no text is shown as Python writes it, and a novel is cut."""
        shown = message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
        super().__init__("".join(each if each.isprintable() else repr(each)[1:-1] for each in shown))


class ConfigError(VitrailError):
    """A model name, a configuration field, a value or an input shape that does not fit."""


class CheckpointError(VitrailError):
    """A checkpoint that cannot be read or written, or does not fit."""


class DataError(VitrailError):
    """A picture or a data set that cannot be read."""


def one_line(error: BaseException) -> str:
    """Why something failed, in the words of whatever raised it, short enough to stand in a message."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]


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
