"""Load on `vitrail serve` and on other servers: CPU per request, latency, overload and memory.

    python benchmarks/serving.py EXPORTED [--int8 EXPORTED_INT8] [--torch WEIGHTS] [--peer NAME=WEIGHTS …]

The rate of the model alone, in threads of this process, is measured first; that of the server follows in the same
minute. A closed loop has 8 connections that ask again as soon as they have an answer. An open loop sends at random
times of a Poisson process, whatever comes back: closed loops hide overload. The client shares the cores with the
server, so that CPU seconds of the server, from /proc, are the figure to trust.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from vitrail.data.photos import PHOTO_FOLDER

CONNECTIONS = 8  # of the closed loop
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Load:
    """What a server did with some requests: seconds of those that were computed, and of those that were refused."""

    seconds: float = 0.0
    cpu: float = 0.0
    accepted: list[float] = field(default_factory=list[float])
    refused: list[float] = field(default_factory=list[float])
    without_hint: int = 0  # refused without Retry-After
    lost: int = 0

    def describe(self) -> dict[str, Any]:
        found = {
            "per_second": len(self.accepted) / self.seconds,
            "cpu_ms": 1000 * self.cpu / max(1, len(self.accepted)),
        }
        found |= {"accepted": len(self.accepted), "refused": len(self.refused), "lost": self.lost}
        for name, values in (("accepted", self.accepted), ("refused", self.refused)):
            if values:
                for share in (50, 99):
                    found[f"{name}_p{share}_ms"] = 1000 * float(np.percentile(values, share))
        return {**found, "without_hint": self.without_hint}


def list_processes(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(each) for file in children for each in file.read_text().split()]
    return [pid, *(one for each in below for one in list_processes(each))]


def read_cpu_seconds(pid: int) -> float:
    ticks = 0
    for each in list_processes(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def read_peak_memory(pid: int) -> float:
    """Megabytes of all processes, at their largest."""
    total = 0
    for each in list_processes(pid):
        lines = Path(f"/proc/{each}/status").read_text().splitlines()
        total += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return total / 1024


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bool]:
    """The status of the answer, and whether it says when to try again."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    await reader.readexactly(int(lines[b"content-length"]))
    return int(head[9:12]), b"retry-after" in lines


class Client:
    """Connections to one server that are used again."""

    def __init__(self, port: int, photo: bytes, path: str = "/") -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: image/jpeg\r\n"
        head += f"Content-Length: {len(photo)}"
        self.port, self.request = port, head.encode() + b"\r\n\r\n" + photo
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, load: Load) -> None:
        start = time.perf_counter()
        try:
            pair = self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port)
            status, has_hint = await ask(*pair, self.request)
        except (OSError, asyncio.IncompleteReadError):
            load.lost += 1
            return
        self.free.append(pair)
        (load.accepted if status == 200 else load.refused).append(time.perf_counter() - start)
        load.without_hint += status != 200 and not has_hint


async def run_closed_loop(client: Client, seconds: float) -> Load:
    load, end = Load(), time.perf_counter() + seconds

    async def repeat() -> None:
        while time.perf_counter() < end:
            await client.ask(load)

    await asyncio.gather(*(repeat() for _ in range(CONNECTIONS)))
    return load


async def run_open_loop(client: Client, seconds: float, rate: float, seed: int) -> Load:
    load, draws, tasks = Load(), random.Random(seed), list[asyncio.Task[None]]()
    start = time.perf_counter()
    due = draws.expovariate(rate)
    while due < seconds:
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(client.ask(load)))
        due += draws.expovariate(rate)
    await asyncio.gather(*tasks)
    return load


def measure(pid: int, client: Client, loop: Any) -> Load:
    """Run a loop in an event loop of its own."""
    client.free.clear()
    cpu, start = read_cpu_seconds(pid), time.perf_counter()
    load: Load = asyncio.run(loop)
    load.seconds, load.cpu = time.perf_counter() - start, read_cpu_seconds(pid) - cpu
    return load


def measure_alone(model: str, photo: bytes, seconds: float) -> dict[str, float]:
    """The model without HTTP: as many streams as cores, each decodes and runs one photo at a time."""
    from vitrail.predict.served_images import ServedImages

    served = ServedImages(model)
    settings = served.parse_settings({})

    def repeat(_: int) -> int:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            served.run(served.prepare("image", photo, settings), ["logits"])
            count += 1
        return count

    served.run(served.prepare("image", photo, settings), ["logits"])
    cpu, start = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(served.streams) as pool:
        count = sum(pool.map(repeat, range(served.streams)))
    used, passed = time.process_time() - cpu, time.perf_counter() - start
    return {"per_second": count / passed, "cpu_ms": 1000 * used / count}


@contextmanager
def start_server(command: Sequence[str], port: int) -> Generator[int]:
    """A server that answers, and its process."""
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)
        try:
            end = time.monotonic() + 120
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if process.poll() is not None or time.monotonic() > end:
                    errors.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not start: {errors.read()[-500:]}")
                time.sleep(0.05)
            time.sleep(0.5)
            yield process.pid
        finally:
            if process.poll() is None:
                for each in reversed(list_processes(process.pid)):
                    os.kill(each, 9)
            process.wait()


def find_free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def measure_start(model: str) -> dict[str, float]:
    """From the command to an open port, of an exported model."""
    port, start = find_free_port(), time.perf_counter()
    command = [sys.executable, "-m", "vitrail", "serve", model, "--port", str(port), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": read_cpu_seconds(process.pid)}
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    found |= {"memory_mb": read_peak_memory(process.pid), "torch": float("libtorch" in maps)}
    process.terminate()
    process.kill()
    process.wait()
    return found


def measure_explanations(model: str, photo: bytes, seconds: float, seed: int) -> dict[str, Any]:
    """Predictions at half of the rate, without and with as many explanations as are computed."""
    port = find_free_port()
    command = [sys.executable, "-m", "vitrail", "serve", model, "--port", str(port), "--quiet"]
    with start_server(command, port) as pid:
        client = Client(port, photo)
        measure(pid, client, run_closed_loop(client, 1))
        rate = measure(pid, client, run_closed_loop(client, seconds)).describe()["per_second"]
        found = {"without": measure(pid, client, run_open_loop(client, seconds, rate / 2, seed)).describe()}
        explained = Load()

        async def run_both() -> Load:
            stopped = asyncio.Event()
            tasks = [asyncio.create_task(explain_until(stopped, port, photo, number, explained)) for number in range(2)]
            await asyncio.sleep(0.5)
            load = await run_open_loop(client, seconds, rate / 2, seed)
            stopped.set()
            await asyncio.gather(*tasks)
            return load

        found["with"] = {**measure(pid, client, run_both()).describe(), "explained": len(explained.accepted)}
    return found


async def explain_until(stopped: asyncio.Event, port: int, photo: bytes, number: int, load: Load) -> None:
    """Ask for one explanation after the other, each of other bytes, since answers are remembered."""
    count = 0
    while not stopped.is_set():
        count += 1
        await Client(port, photo + f"{number} {count}".encode(), "/explain?part=all").ask(load)


def measure_loads(model: str, photo: bytes, seconds: float, overload: float, seed: int) -> dict[str, Any]:
    """The model alone, the closed loop, then the open loop at shares of its rate, the last for `overload` seconds."""
    port = find_free_port()
    found: dict[str, Any] = {"alone": measure_alone(model, photo, seconds)}
    command = [sys.executable, "-m", "vitrail", "serve", model, "--port", str(port), "--quiet"]
    with start_server(command, port) as pid:
        client = Client(port, photo)
        measure(pid, client, run_closed_loop(client, 1))  # connections, and the mean time of an item
        found["closed"] = measure(pid, client, run_closed_loop(client, seconds)).describe()
        rate = found["closed"]["per_second"]
        for share in (0.5, 0.8, 1.2, 10):
            load = measure(pid, client, run_open_loop(client, overload if share > 2 else seconds, share * rate, seed))
            found[f"open {share}"] = load.describe()
        found["after"] = measure(pid, client, run_open_loop(client, 2, 0.5 * rate, seed)).describe()
        found["memory_mb"] = read_peak_memory(pid)
    return found


def measure_peer(name: str, weights: str, photo: bytes, seconds: float) -> dict[str, Any]:
    port = find_free_port()
    script = str(Path(__file__).with_name("serving_peers.py"))
    own = [sys.executable, "-m", "vitrail", "serve", weights, "--port", str(port), "--quiet"]
    command = own if name.startswith("vitrail") else [sys.executable, script, name, str(port), weights]
    with start_server(command, port) as pid:
        client = Client(port, photo)
        measure(pid, client, run_closed_loop(client, 1))
        return {**measure(pid, client, run_closed_loop(client, seconds)).describe(), "memory_mb": read_peak_memory(pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="exported folder, fp32")
    parser.add_argument("--int8", help="exported folder, int8, for the start and the side by side")
    parser.add_argument("--torch", help="weights that run on torch, for explanations next to predictions")
    parser.add_argument("--peer", action="append", default=[], help="timm=FILE, transformers=FOLDER or litserve=FILE")
    parser.add_argument("--photo", default=str(PHOTO_FOLDER / "cat.jpg"))
    parser.add_argument("--only", choices=("loads", "peers", "start", "explain"))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--overload-seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    photo = Path(given.photo).read_bytes()
    servers = {"vitrail fp32": given.model, **dict(each.split("=", 1) for each in given.peer)}
    if given.int8:
        servers["vitrail int8"] = given.int8
    for number in range(given.rounds):
        found: dict[str, Any] = {"round": number}
        if given.only in (None, "start"):
            found["start"] = measure_start(given.int8 or given.model)
        if given.only in (None, "loads"):
            loads = given.seconds, given.overload_seconds, given.seed + number
            found["loads"] = measure_loads(given.model, photo, *loads)
        if given.torch and given.only in (None, "explain"):
            found["explain"] = measure_explanations(given.torch, photo, given.seconds, given.seed + number)
        if given.only in (None, "peers"):
            found["peers"] = {name: measure_peer(name, path, photo, given.seconds) for name, path in servers.items()}
        print(json.dumps(round_numbers(found)), flush=True)


def round_numbers(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: round_numbers(value) for name, value in found.items()}  # pyright: ignore[reportUnknownVariableType]
    return round(found, 2) if isinstance(found, float) else found


if __name__ == "__main__":
    main()
