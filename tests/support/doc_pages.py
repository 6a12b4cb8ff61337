"""Pages of the docs as a reader uses them: commands and snippets in order, and the output that the page shows."""

import ast
import io
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest

import vitrail
from vitrail.cli import COMMANDS, build_app, main

BACKGROUND: "list[subprocess.Popen[str]]" = []  # servers that a page has started
BLOCK = re.compile(r"(?:<!-- (slow|network) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL_COMMANDS = ("python", "ls", "cat", "head", "cp", "mkdir", "curl")  # what a page may run besides vitrail
ELISION = "…"
NUMBER = r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
DURATION = rf"\d+(?::\d\d)+|{NUMBER}(?=\s?(?:s|ms|min|images/s|img/s|MB)\b)"  # differs by machine
TOKEN = re.compile(rf"(?P<duration>{DURATION})|(?P<number>{NUMBER})|(?P<space>\s+)|(?P<gap>{ELISION})|(?P<other>.)")
RELATIVE_TOLERANCE, TOLERANCE, PERCENT_TOLERANCE = 0.1, 0.05, 5.0


@dataclass(frozen=True)
class Step:
    """A command or a Python snippet of a page. `shown` is the output on the page, None if there is none."""

    kind: Literal["command", "python"]
    text: str
    shown: str | None
    mark: str  # slow, network or empty


def read_steps(page: Path) -> list[Step]:
    """The `$` lines of console blocks and the python blocks, in order; a text block is the output of the one before."""
    steps = list[Step]()
    for mark, language, body in BLOCK.findall(page.read_text("utf-8")):
        if language == "console":
            steps += read_commands(body, mark)
        elif language == "python":
            steps.append(Step("python", body, None, mark))
        elif language == "text" and steps and steps[-1].kind == "python":
            steps[-1] = Step("python", steps[-1].text, body, steps[-1].mark)
    return steps


def read_commands(block: str, mark: str) -> Iterator[Step]:
    for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Step("command", command.strip(), output if output.strip() else None, mark)


def run_step(step: Step) -> str:
    """What a reader would see on the terminal; an error fails the test."""
    if step.kind == "python":
        return run_python(step.text)
    words = shlex.split(step.text)
    if words[-1] == "&":
        return run_in_background(words[:-1])
    if words[0] == "vitrail" and "|" not in words:
        return run_vitrail(words[1:])
    assert words[0] in (*SHELL_COMMANDS, "vitrail"), step.text
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        done = subprocess.run(step.text, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def run_in_background(words: Sequence[str]) -> str:
    """Start a server; its address, once it is ready. `end_background_processes` stops it."""
    assert words[0] == "vitrail", words
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    BACKGROUND.append(process)
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def end_background_processes() -> Generator[None]:
    try:
        yield
    finally:
        while BACKGROUND:
            process = BACKGROUND.pop()
            process.kill()
            process.communicate()


def run_vitrail(words: Sequence[str]) -> str:
    """A command in this process, with its exit code checked; stdout and stderr as they would appear."""
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["vitrail", *words])
        patch.setenv("PYTHONSAFEPATH", "1")  # main sets it; this restores it
        with redirect_stdout(screen), redirect_stderr(screen), pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0, f"vitrail {shlex.join(words)}: {screen.getvalue()}"
    return screen.getvalue()


def run_python(code: str) -> str:
    screen = io.StringIO()
    with redirect_stdout(screen):
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return screen.getvalue()


def check_step_without_running(step: Step) -> None:
    """Check that options, arguments and public names exist, for what needs the network or takes long."""
    if step.kind == "command":
        check_command(step.text)
        return
    for node in ast.walk(ast.parse(step.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vitrail":
            getattr(vitrail, node.attr)


def check_command(text: str) -> None:
    words = [word for word in shlex.split(text) if word != "&"]
    if words[0] == "vitrail":
        wanted = [name for name in COMMANDS if name.split()[:1] == words[1:2]]
        with (  # models and data of the reader, or of a step that was not run
            patch("vitrail.checkpoint.model_location.check_model_exists"),
            patch("vitrail.data.images.datasets.check_data_exists"),
        ):
            build_app(wanted or COMMANDS).parse_args(words[1:], exit_on_error=False, print_error=False)
    else:
        assert words[0] in SHELL_COMMANDS, text


def find_difference(shown: str, printed: str) -> str | None:
    """The first shown line that was not printed there. Numbers may differ a little, durations do; … is anything."""
    wanted = [line.rstrip() for line in shown.strip("\n").splitlines()]
    found = [line.rstrip() for line in printed.strip("\n").splitlines()]
    position, elided = 0, False
    for line in wanted:
        if line.strip() == ELISION:
            elided = True
            continue
        places = range(position, len(found)) if elided else range(position, min(position + 1, len(found)))
        match = next((place for place in places if matches_line(line, found[place])), None)
        if match is None:
            return f"shown:   {line}\nprinted: {found[position] if position < len(found) else '(nothing)'}"
        position, elided = match + 1, False
    if position < len(found) and not elided:
        return f"printed, but not shown: {found[position]}"
    return None


def matches_line(shown: str, printed: str) -> bool:
    pattern, numbers = "", list[tuple[float, bool]]()
    for token in TOKEN.finditer(shown):
        text = token.group()
        if token["number"]:
            pattern += f"({NUMBER})"
            numbers.append((parse_number(text), shown[token.end() :].lstrip().startswith("%")))
        else:
            kinds = (("duration", rf"(?:\d+(?::\d\d)+|{NUMBER})"), ("space", r"\s+"), ("gap", ".*"))
            pattern += next((regex for kind, regex in kinds if token[kind]), re.escape(text))
    match = re.fullmatch(pattern, printed)
    return match is not None and all(
        isclose(
            parse_number(text), wanted, rel_tol=RELATIVE_TOLERANCE, abs_tol=PERCENT_TOLERANCE if percent else TOLERANCE
        )
        for text, (wanted, percent) in zip(match.groups(), numbers, strict=True)
    )


def parse_number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))
