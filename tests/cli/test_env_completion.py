"""vitrail env --completion: scripts that the shells accept."""

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from vitrail.cli import COMMANDS


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_loads_the_script_and_completes(vitrail_: Callable[..., Any]) -> None:
    script = vitrail_("env", "--completion", "bash").out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    ask = (
        "complete -p vitrail >&2\n"
        'run() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()\n'
        '"$(complete -p vitrail | sed "s/.*-F \\([^ ]*\\) .*/\\1/")"; echo "${COMPREPLY[@]}"; }\n'
        "run vitrail summ; run vitrail train --lea; run vitrail train --optimizer m\n"
    )
    done = subprocess.run(["bash"], input=f"{script}\n{ask}", capture_output=True, text=True, check=True)
    assert "vitrail" in done.stderr
    assert done.stdout.split("\n")[0] == "summary"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_name_every_command(vitrail_: Callable[..., Any], shell: str) -> None:
    script = vitrail_("env", "--completion", shell).out
    for name in COMMANDS:
        assert name.split()[-1] in script
    assert "stochastic-depth" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)
