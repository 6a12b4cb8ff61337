"""Errors that a user can fix. Each message says what was given, what was expected and what to do."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from vitrail.text import escape_unprintable

MAX_MESSAGE_LENGTH = 2000  # characters


class VitrailError(Exception):
    """Base class of every error that a user can fix. The command line prints its one line and exits with code 2.

    A message names a setting in backticks and lists it in `fields`: ConfigError("`batch` is 0; …", fields=("batch",)).
    The command line replaces `batch` with the option --batch.
    """

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        """Escape unprintable characters, which names in a file may contain, and shorten a long message."""
        self.fields = fields
        if len(message) > MAX_MESSAGE_LENGTH:
            message = f"{message[: MAX_MESSAGE_LENGTH // 2]} … {message[-MAX_MESSAGE_LENGTH // 2 :]}"
        super().__init__(escape_unprintable(message))


class ConfigError(VitrailError):
    """A model name, a configuration field, a value or an input shape that does not fit."""


class CheckpointError(VitrailError):
    """A checkpoint that cannot be read or written, or does not fit."""


class DataError(VitrailError):
    """An image or a data set that cannot be read."""


class OutputError(CheckpointError):
    """A file or folder that cannot be written: a checkpoint, a log, a figure or a report."""


class CheckpointWarning(UserWarning):
    """A warning about a checkpoint; `fields` are named in it in backticks, as in a VitrailError."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        self.fields = fields
        super().__init__(message)


def describe_error(error: BaseException) -> str:
    """Reason of an error, on one line of at most 200 characters, to be quoted in another message."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]


def missing_package_error(
    what: str, package: str, extra: str | None = None, fields: tuple[str, ...] = ()
) -> ConfigError:
    """Error for a package that is not installed, with the command that installs it, by its extra if it is in one."""
    command = f"pip install {package}" if extra is None else f"pip install 'vitrail[{extra}]'"
    return ConfigError(f"{what} needs {package}, which is not installed; run: {command}", fields)


def unknown_name_error(
    what: str, given: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> ConfigError:
    """Error for an unknown name that suggests the nearest valid one; `synonyms` maps other words to valid names."""
    names = list(known)
    nearest = (synonyms or {}).get(str(given))
    if nearest not in names:
        lowered = {name.lower(): name for name in names}
        matches = get_close_matches(str(given).lower(), lowered, n=1, cutoff=0.5)
        nearest = lowered[matches[0]] if matches else None
    if nearest:
        return ConfigError(f"unknown {what} {given!r}; did you mean {nearest!r}?")
    listed = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:5])} and {len(names) - 5} more"
    return ConfigError(f"unknown {what} {given!r}; expected one of {listed}")
