"""Many requests at the same time, each on a connection of its own, and what came of them."""

import http.client
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from support.server_process import Answer, Server


def ask_at_once(server: Server, bodies: Iterable[bytes], path: str = "/") -> list[Answer]:
    """Send all bodies at the same time; the answers in order."""
    listed = list(bodies)
    with ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(partial(server.post, path), listed))


def ask_until_refused(server: Server, body: bytes, results: list[Any]) -> None:
    """Send requests, each on a new connection, until the port is closed; a lost one is noted by its error."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        try:
            connection.connect()
        except ConnectionRefusedError:
            return
        try:
            connection.request("POST", "/", body)
            answer = connection.getresponse()
            results.append((answer.status, json.loads(answer.read())))
        except (OSError, http.client.HTTPException) as error:
            results.append(repr(error))
        finally:
            connection.close()


def wait_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def read_memory(pid: int, field: str = "VmHWM") -> int:
    """Bytes of a process, by the name of a line in /proc/PID/status; VmHWM is the largest so far."""
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))
