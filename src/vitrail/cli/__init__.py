"""The command line: a table of commands, one file each. Nothing heavy is imported before a command runs.

A name of two words is a command in a group: `vitrail study cost` is the function `cost` in study_cost.py, and
`vitrail pretrain mae` is made by pretrain.py from the settings of that task.
"""

import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from vitrail import __version__
from vitrail.base.errors import VitrailError, VitrailWarning, describe_error, format_install_command
from vitrail.base.text import escape_unprintable
from vitrail.cli.options.model_flags import accept_trusted_code
from vitrail.cli.options.values import check_numbers
from vitrail.cli.output.help_text import COMMON, TASKS, HelpFormatter, reflow_docstring
from vitrail.cli.output.streams import open_devnull, redirect_to_devnull, wrap_stdio_against_broken_pipe
from vitrail.cli.usage_errors import check_command, describe_usage_error, use_american_names
from vitrail.tasks import PRETRAINING_TASKS

COMMAND_GROUPS = {  # headings of `vitrail --help`
    "Train": ("train", "distill", "pretrain", *(f"pretrain {task}" for task in PRETRAINING_TASKS), "runs"),
    "Evaluate": ("eval", "probe", "compare", "bench"),
    "Predict and ship": ("predict", "embed", "translate", "caption", "export", "serve"),
    "Look inside": ("explain", "look", "report"),
    "Models and data": ("models", "summary", "convert", "data"),
    "Study": ("ablate", "study", "study cost", "study positions"),
    "This installation": ("env",),
}
COMMANDS = tuple(name for names in COMMAND_GROUPS.values() for name in names)
COMMANDS_WITHOUT_MODELS = ("runs", "models", "data", "study", "study cost", "env")
TOP_HELP = """Train, explain and ship Vision Transformers.

Start with vitrail predict cct_cifar10 example:cat, or vitrail train (a minute).
Every command has examples: vitrail COMMAND --help."""
LONG_RUNNING_COMMANDS = ("train", "distill", "pretrain", "ablate", "study")  # they continue without a reader
OPTIONAL_PACKAGES = ("torch", "safetensors", "yaml")  # not needed to predict with an exported model
# of fields whose option has another name; `task` is set in a recipe only
OPTION_NAMES = {
    "fields": "--set",
    "of_class": "--class",
    "out": "-o",
    "source": "--from",
    "for_target": "--for",
    "task": "task",
}
OUT_OF_MEMORY = re.compile("allocate memory|out of memory")  # in a RuntimeError of torch
USER_OS_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # not bugs of vitrail


def build_app(names: Sequence[str] = COMMANDS) -> App:
    table = App(
        name="vitrail",
        help=TOP_HELP,
        version=f"vitrail {__version__}",
        version_flags=["--version"],
        help_format="plaintext",
        help_formatter=HelpFormatter(),
        group_arguments=Group("Arguments", sort_key=0),
        group_parameters=COMMON,
        default_parameter=Parameter(validator=check_numbers),
    )
    table["--help"].group = table["--version"].group = Group("Options", sort_key=len(COMMAND_GROUPS))
    for number, (title, members) in enumerate(COMMAND_GROUPS.items()):
        group = Group(title, sort_key=number)
        for place, name in enumerate(members):
            parent, _, child = name.partition(" ")
            if child and name in names and parent not in table:
                table.command(load_command(parent), name=parent, group=group, sort_key=place)
            if child and name in names:
                heading = TASKS if parent == "pretrain" else None
                table[parent].command(load_command(name), name=child, sort_key=place, group=heading)
            elif name in names:
                table.command(load_command(name), name=name, group=group, sort_key=place)
    return table


def load_command(name: str) -> Callable[..., None]:
    """The function of a command in its file; its docstring is the help."""
    if name.startswith("pretrain "):
        return accept_trusted_code(import_module("vitrail.cli.pretrain").make_task_command(name.split()[1]))
    file = name.replace("-", "_").replace(" ", "_")
    word = name.replace("-", "_").split()[-1]
    command = reflow_docstring(getattr(import_module(f"vitrail.cli.{file}"), word))  # imported when it is needed
    return command if name in COMMANDS_WITHOUT_MODELS else accept_trusted_code(command)


def name_options(message: str, fields: Sequence[str]) -> str:
    """Replace each `field` in a message by its command-line option: --field, or --set for a model's `heads=…`."""
    for field in fields:
        option = f"--set {field}" if field.endswith("=…") else f"--{field.replace('_', '-')}"
        message = message.replace(f"`{field}`", OPTION_NAMES.get(field, option))
    return message


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    text = name_options(str(message), message.fields if isinstance(message, VitrailWarning) else ())
    print(f"vitrail: warning: {escape_unprintable(' '.join(text.split()))}", file=sys.stderr)


def main() -> NoReturn:
    """Run the command. An error that a user can fix is one line on stderr and exit code 2."""
    sys.stdout, sys.stderr = sys.stdout or open_devnull(), sys.stderr or open_devnull()  # `>&-` closes them
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × or ─ shows ?
    warnings.showwarning = print_warning
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about damaged tags; a photo that cannot be read is our error
    os.environ["PYTHONSAFEPATH"] = "1"  # no process started from here imports a json.py in the current folder
    try:
        words = use_american_names(sys.argv[1:])
        check_command(words, COMMANDS)
        if words[:1] and words[0] in LONG_RUNNING_COMMANDS:
            sys.stdout, sys.stderr = (
                wrap_stdio_against_broken_pipe(sys.stdout),
                wrap_stdio_against_broken_pipe(sys.stderr),
            )
        wanted = [name for name in COMMANDS if name.split()[:1] == words[:1]]  # only these are imported
        build_app(wanted or COMMANDS)(words, print_error=False, exit_on_error=False, result_action="return_value")
        sys.stdout.flush()
    except VitrailError as error:
        print(f"vitrail: {' '.join(name_options(str(error), error.fields).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except CycloptsError as error:
        print(f"vitrail: {' '.join(describe_usage_error(error).split())}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_PACKAGES:
            raise
        print(
            f"vitrail: this needs {error.name}, which is not installed; run: {format_install_command()}; without it, "
            "predict, embed and bench work on a folder that `vitrail export` wrote",
            file=sys.stderr,
        )
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and OUT_OF_MEMORY.search(str(error)) is None:
            raise
        where = f"there is not enough memory: {describe_error(error)}"
        print(f"vitrail: {where}; use a smaller model, image size or batch", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # as in `vitrail models | head`
        redirect_to_devnull(sys.stdout)
    except OSError as error:
        if error.errno not in USER_OS_ERRORS:
            raise
        if error.filename is None:  # standard output failed
            redirect_to_devnull(sys.stdout)
        where = "the output cannot be written" if error.filename is None else f"{error.filename!r} cannot be used"
        print(f"vitrail: {where}: {describe_error(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
