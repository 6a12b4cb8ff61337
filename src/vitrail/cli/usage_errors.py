"""Errors in a command line, each on one line. Names of other tools are known: --learning-rate is --lr."""

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts import CycloptsError, Token, UnknownCommandError, UnknownOptionError
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnusedCliTokensError,
    ValidationError,
)

from vitrail.base.errors import ConfigError, find_nearest_name
from vitrail.base.text import AMERICAN_NAMES

SYNONYMS_FILE = Path(__file__).with_name("names_in_other_tools.json")  # our names: those of other tools
MOVED_COMMANDS = {  # of version 0.1: what they are called now
    "inspect-checkpoint": "summary",
    "lessons": "look --lessons",
    "completion": "env --completion",
}
NUMBER_NAMES: dict[Any, str] = {int: "a whole number", float: "a number"}


def use_american_names(words: Sequence[str]) -> list[str]:
    """Options and choices that had a British spelling: --grey is --gray, --crop centre is --crop center."""
    options = {f"--{old.replace('_', '-')}": f"--{new.replace('_', '-')}" for old, new in AMERICAN_NAMES.items()}
    found = list[str]()
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in ("--crop", "--target", "--method", *options):
            word = f"{options.get(name, name)}={AMERICAN_NAMES.get(value, value)}"
        elif found and found[-1] in ("--crop", "--target", "--method"):
            word = AMERICAN_NAMES.get(word, word)
        found.append(options.get(word, word))
    return found


def describe_usage_error(error: CycloptsError) -> str:
    """What is wrong with the command line and what to do, on one line."""
    chain = " ".join(error.command_chain or ())
    command, page = f"vitrail {chain}".strip(), f"See vitrail {chain} --help."
    name = "" if error.argument is None else error.argument.name
    name = name if name.startswith("-") else name.upper()
    match error:
        case UnknownCommandError():
            names = [each for each in error.app or () if not each.startswith("-")]
            return describe_unknown_command((error.unused_tokens or [""])[0], names, command)
        case UnknownOptionError():
            given = error.token.keyword or error.token.value
            return describe_unknown_option(given, list_names(error.argument_collection), command)
        case CoercionError(token=Token() as token):
            return f"{token.keyword or name} {token.value!r} is not {describe_type(error.target_type, token.value)}"
        case ValidationError() if error.argument is not None and error.argument.tokens:
            return f"{name} {error.argument.tokens[0].value}; {error.exception_message}"
        case MissingArgumentError(keyword=str() as keyword):
            return f"{keyword} needs a value. {page}"
        case MissingArgumentError():
            return f"{chain} needs {name}. {page}"
        case RepeatArgumentError():
            return f"{error.token.keyword} is given more than once. Give it once."
        case UnusedCliTokensError():
            given = (error.unused_tokens or [""])[0]
            option = choose_option(given, list_names(find_arguments(error)))
            hint = f"Did you mean {option} {shlex.quote(given)}?" if option else page
            return f"Unexpected argument {given!r}. {hint}"
        case _:
            return str(error)


def describe_type(hint: Any, given: str) -> str:
    """What a value should have been: a number, or one of some words."""
    if get_origin(hint) is not Literal:
        names = [NUMBER_NAMES.get(each) or str(*get_args(each)) or each.__name__ for each in get_args(hint) or (hint,)]
        return f"{' or '.join(names)}."
    words = [str(each) for each in get_args(hint)]
    nearest = find_nearest_name(given, words)
    return f"one of {', '.join(words)}.{f' Did you mean {nearest}?' if nearest else ''}"


def find_arguments(error: CycloptsError) -> Iterable[Any]:
    """The options and arguments of the command that an error is about."""
    app = error.app
    for word in error.command_chain or () if app is not None else ():
        app = app[word] if app is not None and word in app else app
    return [] if app is None else app.assemble_argument_collection()


def choose_option(argument: str, known: Sequence[str]) -> str | None:
    """The option that an argument without a name is probably meant for: a run, a model or data."""
    from vitrail.checkpoint.model_location import is_model
    from vitrail.checkpoint.run_files import is_run_folder

    meant = ["--resume"] if is_run_folder(Path(argument)) else ["--init"] if is_model(argument) else []
    return next((option for option in (*meant, "--data") if option in known), None)


def list_names(arguments: Iterable[Any]) -> list[str]:
    """The options of a command, and its arguments in capitals."""
    return [name if name.startswith("-") else name.upper() for each in arguments for name in each.names if each.parse]


def describe_unknown_option(given: str, known: Iterable[str], command: str) -> str:
    names, given = list(known), given.partition("=")[0]
    plain = f"-{given}" if len(given) > 2 and not given.startswith("--") else given  # -lr
    nearest = find_nearest(plain.replace("_", "-"), names, "options")
    if nearest is not None and nearest.isupper():
        return f"Unknown option {given}. {nearest} is an argument, without a name: see {command} --help."
    return f"Unknown option {given}. {f'Did you mean {nearest}?' if nearest else f'See {command} --help.'}"


def check_command(words: list[str], commands: Iterable[str]) -> None:
    """Refuse an unknown command before any command is imported."""
    names = [name.partition(" ") for name in commands]
    if words and words[0] in MOVED_COMMANDS:
        raise ConfigError(f"{words[0]} is now vitrail {MOVED_COMMANDS[words[0]]}. See vitrail --help.")
    parents = [*dict.fromkeys(parent for parent, _, _ in names), "--help", "--version"]
    if words and not words[0].startswith("-") and words[0] not in parents:
        raise ConfigError(describe_unknown_command(words[0], parents, "vitrail"))
    children = [child for parent, _, child in names if child and words[:1] == [parent]]
    if children and words[1:] and not words[1].startswith("-") and words[1] not in children:
        raise ConfigError(describe_unknown_command(words[1], children, f"vitrail {words[0]}"))


def describe_unknown_command(given: str, known: Iterable[str], command: str) -> str:
    nearest = find_nearest(given.lower(), known, "commands")
    return f"Unknown command {given!r}. {f'Did you mean {command} {nearest}?' if nearest else f'See {command} --help.'}"


def find_nearest(given: str, known: Iterable[str], kind: Literal["commands", "options"]) -> str | None:
    """The known name that is meant: by its name in other tools, else by its spelling."""
    names, synonyms = list(known), json.loads(SYNONYMS_FILE.read_text("utf-8"))[kind]
    meant = [ours for ours, others in synonyms.items() if given in others.split() and ours.split()[0] in names]
    same = [given] if given in names else []
    bare = {name.lstrip("-"): name for name in reversed(names)}  # all options begin alike
    nearest = find_nearest_name(given.lstrip("-"), bare)
    return next(iter((*same, *meant, *([bare[nearest]] if nearest else []))), None)


def check_arguments(command: str, model: str, images: Sequence[str]) -> None:
    """Refuse an image in the place of the model, and misspelt options, which are parsed as images like - for stdin."""
    from vitrail.checkpoint.model_location import refuse_image_as_model

    refuse_image_as_model(model)
    for each in images:
        if len(each) > 1 and each.startswith("-") and not os.path.lexists(each):
            from vitrail.cli import build_app

            names = list_names(build_app([command])[command].assemble_argument_collection())
            raise ConfigError(describe_unknown_option(each, names, f"vitrail {command}"))
