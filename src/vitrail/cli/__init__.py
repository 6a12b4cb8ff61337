"""The command line: one table of commands, one file for each. Nothing heavy is imported before a command runs."""

import sys
from typing import NoReturn

from cyclopts import App, CycloptsError

from vitrail import __version__
from vitrail.errors import VitrailError

COMMANDS = ("models", "summary")  # each the function of that name in the file of that name; its docstring is the help


def app() -> App:
    table = App(
        name="vitrail",
        help="The Vision Transformer toolbox. Start with: vitrail models 'vit_base*', then vitrail summary ViT-B/16",
        version=f"vitrail {__version__}",
        version_flags=["--version"],
        help_format="plaintext",
    )
    for name in COMMANDS:
        table.command(f"vitrail.cli.{name}:{name}", name=name)
    return table


def main() -> NoReturn:
    """Runs the command; what a user can fix is one line on stderr and exit code 2."""
    try:
        app()(print_error=False, exit_on_error=False)
    except (VitrailError, CycloptsError) as error:
        message = " ".join(str(error).split())
        print(f"vitrail: {message}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `vitrail models | head`
        sys.stderr.close()
    sys.exit(0)
