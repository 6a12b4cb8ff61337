"""`vitrail serve` in a process of its own on a free port of this machine, and a plain client."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
PROGRAM = """
import functools, json, sys
from vitrail.base.kinds import KINDS
KINDS["digits"] = "support.toy_served"
if changes := json.loads(sys.argv.pop(1)):
    from vitrail.serve import settings
    settings.ServeSettings = functools.partial(settings.ServeSettings, **changes)
from vitrail.cli import main
main()
"""
METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """A running process."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process, self.address = process, address.rstrip("/")
        self.port = urlsplit(address).port or 0

    def ask(
        self, method: str, path: str, body: bytes | str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers or {}))
            found = connection.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: bytes | str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, body, named)

    def read_metrics(self, name: str) -> dict[str, float]:
        """The values of a metric by its labels, as Prometheus writes them."""
        found = METRIC.findall(self.get("/metrics").body.decode())
        return {labels: float(value) for each, labels, value in found if each == name}

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def run_server(
    *words: object,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Generator[Server]:
    """A server that is ready; it is stopped at the end. `settings` are those that have no option."""
    folders = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **(env or {})}
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        json.dumps(dict(settings or {})),
        "serve",
        *map(str, words),
        "--port",
        "0",
    ]
    with Path(log or os.devnull).open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=given)
    assert process.stdout is not None
    try:
        line = next((each for each in process.stdout if "http://" in each), "")
        assert line, f"the server ended with {process.wait(5)}"
        yield Server(process, line.split()[-1])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()
