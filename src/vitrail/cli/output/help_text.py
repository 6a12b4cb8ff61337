"""Help pages: the headings of options in the order in which they are needed, columns below them, and docstrings for
terminals of any width.
"""

import re
import textwrap
from collections.abc import Callable
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, TypeVar

from cyclopts import Group

TASKS = Group("Tasks", sort_key=0)
COMMON = Group("Common options", sort_key=1)
DISTILLATION = Group("Distillation", sort_key=2)
TASK = Group("Settings of the task", sort_key=2)
SEARCH = Group("Search", sort_key=2)
MODEL = Group("Model", sort_key=3)
DATA = Group("Data", sort_key=4)
AUGMENTATION = Group("Augmentation", sort_key=5)
OPTIMIZER = Group("Optimizer", sort_key=6)
LOOP = Group("Training loop", sort_key=7)
SPEED = Group("Devices and speed", sort_key=8)
TRANSLATION = Group("Translation", sort_key=9)
CAPTIONS = Group("Captions", sort_key=10)
NETWORK = Group("Network", sort_key=11)
LIMITS = Group("Limits", sort_key=12)
FIRST_OPTIONS = (  # of the common ones, before all others
    *("--teacher", "--data", "--init", "--model", "--recipe", "--epochs", "--minutes", "--lr", "--batch", "--threads"),
    *("--seed", "--out", "--resume"),
)


if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

Documented = TypeVar("Documented", bound=Callable[..., Any])
NAME_WIDTH = 27  # characters of the column with the names
METAVARS = {  # the values of options that take text; of others NAME
    "FIELD=VALUE": ("--set", "--preprocessing", "--teacher-set"),
    "PATH": ("--data", "--check"),
    "SIZE": ("--image-size", "--patch-size"),
    "LIST": ("--batches", "--engines", "--peers", "--tokens"),
    "START:END": ("--teacher-momentum", "--teacher-temperature"),
    "INT": ("--threads", "--classes"),
    "LAYER": ("--layer",),
    "HEAD": ("--head",),
}
HIDDEN_DEFAULTS = (None, "False", '""')  # of flags, and of options that are off


def reflow_docstring(documented: Documented) -> Documented:
    """Join each paragraph of the docstring into one line; examples and headings stay."""
    lines = list[str]()
    for line in cleandoc(documented.__doc__ or "").splitlines():
        last = lines[-1] if lines else ""
        same_indent = len(line) - len(line.lstrip()) == len(last) - len(last.lstrip())
        continues = line.strip() and last.strip() and same_indent
        if continues and not line.lstrip().startswith(("vitrail ", "---")) and not last.startswith("---"):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    documented.__doc__ = "\n".join(lines)
    return documented


class HelpFormatter:
    """Prints a help page without boxes: usage, description, then a heading and two columns per group."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:  # noqa: ARG002
        if not panel.entries:
            return
        from rich.text import Text

        console.print(Text(f"\n{panel.title}", style="bold"))
        column = min(NAME_WIDTH, max(len(format_names(each)) for each in panel.entries))
        for each in sorted(panel.entries, key=rank_entry) if panel.title == COMMON.name else panel.entries:
            names = format_names(each)
            lines = wrap_text(format_description(each), console.width - column - 5)
            lines = ["", *lines] if len(names) > column else lines
            console.print(
                Text.assemble("  ", (names.ljust(column if lines[0] else 0), "cyan"), "  " * bool(lines[0]), lines[0])
            )
            for line in lines[1:]:
                console.print(Text(" " * (column + 4) + line))

    def render_usage(self, console: "Console", _: "ConsoleOptions", usage: object) -> None:
        console.print(
            f"Usage: {name_optional_arguments(str(usage).strip())}\n", style="bold", markup=False, highlight=False
        )

    def render_description(self, console: "Console", _: "ConsoleOptions", description: Any) -> None:
        """Print the text; a docstring's `Examples::` is a heading of indented lines."""
        text = str(description.primary_renderable).replace("Examples::\n\n", "Examples:\n")
        for line in text.splitlines():
            lines = [line.removeprefix("  ")] if line.startswith(" ") else wrap_text(line, console.width - 1)
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def name_optional_arguments(usage: str) -> str:
    """Name the arguments that may be left out: vitrail explain [OPTIONS] MODEL [IMAGES...]."""
    start, found, _ = usage.partition("[ARGS")
    if not found:
        return usage
    from vitrail.cli import build_app

    command = usage.split()[1]  # groups of commands have no arguments
    arguments = build_app([command])[command].assemble_argument_collection()
    optional = [each for each in arguments if each.index is not None and not each.required]
    names = [each.name.lstrip("-").upper() + "..." * each.is_var_positional() for each in optional]
    return start + " ".join(f"[{name}]" for name in names)


def wrap_text(text: str, width: int) -> list[str]:
    """Lines of at most this width; [recipe: 16] and option names are not broken."""
    joined = re.sub(r"\[(recipe|default): (\S+)\]", "[\\1:\N{NO-BREAK SPACE}\\2]", text)
    lines = textwrap.wrap(joined, max(width, 20), break_on_hyphens=False, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


def rank_entry(entry: "HelpEntry") -> int:
    """The place of a common option; others follow in their own order."""
    return next((place for place, name in enumerate(FIRST_OPTIONS) if name in entry.names), len(FIRST_OPTIONS))


def format_names(entry: "HelpEntry") -> str:
    """The names of an option with its value, as in -o, --out PATH; or the name of an argument or a command."""
    if entry.positional_label:
        return entry.positional_label
    metavar = entry.metavar or ""
    if metavar.startswith(("STR", "INT|")):
        metavar = next((value for value, options in METAVARS.items() if entry.names[0] in options), "NAME")
    return f"{', '.join((*entry.positive_shorts, *entry.positive_names, *entry.negative_names))} {metavar}".strip()


def format_description(entry: "HelpEntry") -> str:
    """The help text, then choices and default in brackets."""
    text, _, default = str(entry.description.primary_renderable).partition(" [default: ")
    if entry.choices:
        text += f" [choices: {', '.join(entry.choices)}]"
    if default:  # written in the text, since it depends on other things
        text += f" [default: {default}"
    elif entry.default not in HIDDEN_DEFAULTS:
        text += f" [{'' if entry.default.startswith('recipe: ') else 'default: '}{entry.default}]"
    return text + " [required]" * (entry.required and not entry.positional_label)
