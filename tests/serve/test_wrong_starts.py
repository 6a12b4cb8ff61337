"""What cannot be served is one line on stderr and exit code 2, before anything listens."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.server_process import ROOT
from support.toy_served import save_digits

PROGRAM = """
import sys
from vitrail.base.kinds import KINDS
KINDS["digits"] = "support.toy_served"
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))
from vitrail.cli import main
main()
"""


def start(folder: Path, *words: object, missing: str = "", env: dict[str, str] | None = None) -> str:
    """The last line of a command that fails."""
    paths = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, missing, "serve", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": paths, "HOME": str(folder), "HF_HUB_OFFLINE": "1", **(env or {})},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("vitrail: ")


def test_a_busy_port(tmp_path: Path) -> None:
    folder = save_digits(tmp_path / "digits")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        message = start(tmp_path, folder, "--port", port)
    assert (
        message
        == f"--port {port} of 127.0.0.1 cannot be used: Address already in use; use another --port, or 0 for any"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing"),
        (["bad name=digits"], "expected NAME=MODEL with a name of letters, digits"),
        (["=digits"], "expected NAME=MODEL"),
        (["digits", "digits"], "both have the name digits; name one of them: other=digits"),
        (["digits", "--port", 70_000], "--port 70000; expected 1 to 65535, or 0 for any free port"),
        (["digits", "--max-wait", 0], "--max-wait 0.0; expected more than 0"),
        (["digits", "--host", "0.0.0.0"], "can be reached from other machines; give a --token-file"),
        (["digits", "--host", "no.such.host.invalid"], "can be reached from other machines"),
        (["digits", "--token-file", "no"], "no does not exist; write a token into it: openssl rand -hex 16 > no"),
        (["digits", "--token-file", "short"], "the token has 5 characters; expected at least 12"),
        (["broken"], "broken is broken; train it again"),
    ],
)
def test_wrong_words(words: list[object], message: str, tmp_path: Path) -> None:
    save_digits(tmp_path / "digits")
    save_digits(tmp_path / "broken", version="broken")  # type: ignore[arg-type]
    (tmp_path / "short").write_text("short")
    port = [] if "--port" in words else ["--port", 0]  # the default one may be taken
    assert message in start(tmp_path, *words, *port)


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "httptools", "prometheus_client"])
def test_a_missing_extra(package: str, tmp_path: Path) -> None:
    message = start(tmp_path, save_digits(tmp_path / "digits"), missing=package)
    assert message.startswith(f"vitrail serve needs {package}, which is not installed; run: ")
