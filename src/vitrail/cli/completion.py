"""vitrail completion: print a completion script for a shell."""

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script for a shell.

    With it, the Tab key completes commands and options. Load it when the shell starts. bash: add eval "$(vitrail
    completion bash)" to ~/.bashrc. zsh: write the script to a file _vitrail in a folder of $fpath. fish: write it
    to ~/.config/fish/completions/vitrail.fish.

    Examples::

        vitrail completion bash
        vitrail completion zsh

    Parameters
    ----------
    shell
        The shell.
    """
    from vitrail.cli import build_app

    print(build_app().generate_completion(shell=shell))
