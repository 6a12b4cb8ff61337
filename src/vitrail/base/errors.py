"""Errors that a user can fix. Each message says what was given, what was expected and what to do."""

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from shlex import quote
from typing import Any

from vitrail.base.text import escape_unprintable

MAX_MESSAGE_LENGTH = 2000  # characters
MIN_SIMILARITY = 0.7  # of a name that is suggested instead of an unknown one; 1 is equal
MIN_LENGTH_OF_START = 4  # characters of an unknown name that may be the beginning of a longer one
FIELD_IN_MESSAGE = re.compile("`([a-z_]+(?:=…)?)`")


class VitrailError(Exception):
    """Base class of every error that a user can fix. The command line prints its one line and exits with `exit_code`.

    A message names a setting in backticks: ConfigError("`batch` is 0; …"). `fields` lists these names, and the command
    line replaces `batch` with the option --batch.
    """

    exit_code = 2  # of the command line

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        """Escape unprintable characters, which names in a file may contain, and shorten a long message."""
        self.fields = fields or tuple(FIELD_IN_MESSAGE.findall(message))
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


class VitrailWarning(UserWarning):
    """Base class of warnings that name settings in backticks, as a VitrailError does."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        self.fields = fields or tuple(FIELD_IN_MESSAGE.findall(message))
        super().__init__(message)


class CheckpointWarning(VitrailWarning):
    """A warning about a checkpoint."""


def describe_error(error: BaseException) -> str:
    """Reason of an error, on one line of at most 200 characters, to be quoted in another message."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]


def missing_package_error(what: str, package: str, extra: str | None = None) -> ConfigError:
    """Error for a package that is not installed, with the command that installs it, by its extra if it is in one."""
    command = f"pip install {package}" if extra is None else format_install_command(extra)
    return ConfigError(f"{what} needs {package}, which is not installed; run: {command}")


def format_install_command(extra: str | None = None) -> str:
    """The command that installs an extra, or this package again, from where it came: a clone, a wheel or an index."""
    import json  # these are slow to import
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    end = f"[{extra}]" if extra else ""
    try:  # pip writes this file, unless the package came from an index
        origin: Any = json.loads(distribution("vitrail").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if tool := origin.get("vcs_info", {}).get("vcs"):
        return f"pip install {quote(f'vitrail{end} @ {tool}+{url}')}"
    source = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
    if source is None or not source.exists():
        return f"pip install {quote(f'vitrail{end}')}"
    if source.is_file():
        return f"pip install {quote(f'{source}{end}')}"
    go = "" if source == Path.cwd() else f"cd {quote(str(source))} && "
    pins = "-c constraints.txt " if (source / "constraints.txt").exists() else ""
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"{go}pip install {pins}{editable}{quote(f'.{end}')}"


def unknown_name_error(
    what: str, given: object, known: Iterable[str], synonyms: Mapping[str, str | tuple[str, ...]] | None = None
) -> ConfigError:
    """Error for an unknown name that suggests the nearest valid one.

    `synonyms` maps other words to names, or to several of which the first valid one is suggested.
    """
    names = list(known)
    meant = (synonyms or {}).get(str(given), ())
    candidates = (meant,) if isinstance(meant, str) else meant
    nearest = next((each for each in candidates if each in names), None) or find_nearest_name(str(given), names)
    if nearest:
        return ConfigError(f"unknown {what} {given!r}; did you mean {nearest!r}?")
    listed = ", ".join(names) if len(names) <= 40 else f"{', '.join(names[:5])} and {len(names) - 5} more"
    return ConfigError(f"unknown {what} {given!r}; expected one of {listed}")


def find_nearest_name(given: str, names: Iterable[str], min_similarity: float = MIN_SIMILARITY) -> str | None:
    """The most similar name, in its own spelling; None if none is similar. The first of equally similar names wins.

    The beginning of a name and each of its words count almost as much as all of it: vit_tinny is nearest to
    vit_tiny_patch16_224, dog to Eskimo dog. So do the same letters in another order: evn and env.
    """
    text = given.lower()
    matcher = SequenceMatcher(b=text)

    def similarity(name: str) -> float:
        known = name.lower()
        matcher.set_seq1(known)
        is_word = len(text) > 2 and text in re.findall(r"[^\W_]+", known)
        same = is_word or sort_letters(text) == sort_letters(known)
        complete = max(matcher.ratio(), 0.8 * same)
        if len(text) < MIN_LENGTH_OF_START:
            return complete
        matcher.set_seq1(known[: len(text)])
        return max(complete, 0.9 * matcher.ratio())

    nearest, score = max(((name, similarity(name)) for name in names), key=lambda each: each[1], default=("", 0.0))
    return nearest if score >= min_similarity else None


def sort_letters(name: str) -> list[str]:
    """The letters and digits of a name, sorted: the same for names that differ in order and punctuation."""
    return sorted(re.sub(r"[\W_]", "", name))


def unusable_device_error(name: str, error: Exception | None = None) -> ConfigError:
    """The error about a device that does not exist; torch's reason is given only for a real kind of device."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps") or error is None:
        return ConfigError(f"`device` {name} is not a device. Use cpu, cuda, cuda:1 or mps.")
    reason = describe_error(error).partition(". ")[0].rstrip(".")
    return ConfigError(f"`device` {name} cannot be used: {reason}. Use `device` cpu.")
