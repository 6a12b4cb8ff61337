"""Errors that a user can fix. Each message says what was given, what was expected and what to do."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from vitrail.text import escape_unprintable

MAX_MESSAGE_LENGTH = 2000  # characters of a message


class VitrailError(Exception):
    """Base class of every error that a user can fix. The command line prints its one line and exits with code 2.

    A message names a setting in backticks and lists it in `fields`: ConfigError("`batch` is 0; …", fields=("batch",)).
    The command line replaces `batch` with the option --batch.
    """

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        """Escape unprintable characters, which names in a file may contain, and shorten a long message."""
        self.fields = fields
        shown = (
            message
            if len(message) <= MAX_MESSAGE_LENGTH
            else f"{message[: MAX_MESSAGE_LENGTH // 2]} … {message[-MAX_MESSAGE_LENGTH // 2 :]}"
        )
        super().__init__(escape_unprintable(shown))


class ConfigError(VitrailError):
    """A model name, a configuration field, a value or an input shape that does not fit."""


class CheckpointError(VitrailError):
    """A checkpoint that cannot be read or written, or does not fit."""


class DataError(VitrailError):
    """A picture or a data set that cannot be read."""


def describe_error(error: BaseException) -> str:
    """Why something failed, in the words of whatever raised it, short enough to stand in a message."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]


def unknown_name_error(
    what: str, given: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> ConfigError:
    """An unknown name, with the nearest valid one; `also` holds other words for the known names."""
    names = list(known)
    near = (synonyms or {}).get(str(given))
    if near not in names:
        lowered = {name.lower(): name for name in names}
        near = next((lowered[name] for name in get_close_matches(str(given).lower(), lowered, n=1, cutoff=0.5)), None)
    if near:
        return ConfigError(f"unknown {what} {given!r}; did you mean {near!r}?")
    listed = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:5])} and {len(names) - 5} more"
    return ConfigError(f"unknown {what} {given!r}; expected one of {listed}")
