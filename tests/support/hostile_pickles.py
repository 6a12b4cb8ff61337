"""Pickles that call whatever torch allows, with arguments and sizes that no honest file has.

Run as a script with a folder and a count, it makes and reads that many pickles. It prints a line of JSON for each one
that ran something, took too much time or memory, or raised anything but a CheckpointError.
"""

import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

MEMORY_SLACK = 2**26  # bytes, the same allowance as for the tensors of a file
TIME_LIMIT = 10
LEGACY_HEADER = b"".join(pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
EDGE_NUMBERS = (0, 1, 2, 3, 16, 255, 10**6, 10**9, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**200, -1, -(2**40))
FORBIDDEN_NAMES = (
    "posix.system",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "torch.hub.load",
    "torch.load",
)
FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "pickle.find_class",
    "exec",
    "compile",
    "socket.connect",
)


def allowed_names() -> list[str]:
    """Names that this version of torch allows a pickle to call."""
    from torch import _weights_only_unpickler as unpickler

    return sorted(getattr(unpickler, "_get_allowed_globals")())  # noqa: B009


class RandomPickleWriter:
    """Writes random opcodes; each method leaves one value on the stack."""

    def __init__(self, draw: random.Random, names: list[str], container: str) -> None:
        self.draw, self.names, self.container = draw, names, container
        self.memo = 0
        self.keys = list[str]()

    def number(self, value: int | None = None) -> bytes:
        value = self.draw.choice(EDGE_NUMBERS) if value is None else value
        data = pickle.encode_long(value)
        return b"\x8a" + bytes([len(data)]) + data

    def text(self, value: str) -> bytes:
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def name(self, dotted: str) -> bytes:
        module, _, last = dotted.rpartition(".")
        return f"c{module}\n{last}\n".encode()

    def group(self, *parts: bytes) -> bytes:
        return b"(" + b"".join(parts) + b"t"

    def doubled(self, inner: bytes) -> bytes:
        """A container that holds the next one twice, up to 50 levels deep."""
        kind, steps = self.draw.choice((b"\x86", b"l", b"d")), inner
        for _ in range(self.draw.choice((3, 20, 50))):
            place = b"r" + struct.pack("<I", self.memo)
            again = b"j" + struct.pack("<I", self.memo)
            steps += place + (again + b"\x86" if kind == b"\x86" else b"0(" + again + again + kind)
            self.memo += 1
        return steps

    def storage(self) -> bytes:
        kind = self.draw.choice([name for name in self.names if name.endswith("Storage")])
        self.keys.append(key := self.draw.choice(("0", "0", "1")))
        parts = [self.text("storage"), self.name(kind), self.text(key), self.text("cpu"), self.count()]
        if self.container == "legacy":
            view = self.group(self.text("v"), self.count(), self.count())
            parts.append(self.draw.choice((b"N", b"N", view)))
        return self.group(*parts) + b"Q"

    def count(self) -> bytes:
        return self.number(self.draw.choice((0, 1, 4, 16, self.draw.choice(EDGE_NUMBERS))))

    def shape(self) -> bytes:
        return self.group(*(self.count() for _ in range(self.draw.choice((0, 1, 1, 2, 4, 70)))))

    def tensor(self) -> bytes:
        """A plain tensor, valid or not: missing values, strides of 0, negative sizes."""
        parts = [
            self.storage(),
            self.count(),
            self.shape(),
            self.shape(),
            b"\x89",
            self.call("collections.OrderedDict"),
        ]
        if self.draw.random() < 0.5:
            parts[0:4] = [self.honest(), b"K\0", self.group(self.number(2)), self.group(self.number(1))]
        elif self.draw.random() < 0.5:  # expanded: one value many times
            sizes = [self.count() for _ in range(self.draw.randrange(1, 4))]
            parts[0:4] = [self.honest(), b"K\0", self.group(*sizes), self.group(*[b"K\0"] * len(sizes))]
        return self.name("torch._utils._rebuild_tensor_v2") + self.group(*parts) + b"R"

    def honest(self) -> bytes:
        self.keys.append("0")
        last = b"N" if self.container == "legacy" else b""
        parts = (
            self.text("storage"),
            self.name("torch.FloatStorage"),
            self.text("0"),
            self.text("cpu"),
            b"K\x10",
            last,
        )
        return self.group(*parts) + b"Q"

    def call(self, dotted: str, *parts: bytes) -> bytes:
        return self.name(dotted) + self.group(*parts) + self.draw.choice((b"R", b"R", b"\x81"))

    def value(self, depth: int = 3) -> bytes:
        draw = self.draw
        leaves: list[Callable[[], bytes]] = [
            lambda: b"N",
            lambda: draw.choice((b"\x88", b"\x89")),
            self.number,
            lambda: self.text(draw.choice(("", "cpu", "meta", "latin1", "zlib", "punycode", "x" * 100))),
            lambda: self.name(draw.choice(self.names)),
            self.storage,
            self.tensor,
        ]
        if depth == 0:
            return draw.choice(leaves)()
        inside: list[Callable[[], bytes]] = [
            lambda: self.group(*(self.value(depth - 1) for _ in range(draw.randrange(4)))),
            lambda: b"](" + b"".join(self.value(depth - 1) for _ in range(draw.randrange(4))) + b"e",
            lambda: b"}(" + b"".join(self.value(depth - 1) for _ in range(2 * draw.randrange(3))) + b"u",
            lambda: self.doubled(self.value(depth - 1)),
            lambda: self.shape(),
            lambda: self.any_call(depth),
        ]
        return draw.choice(leaves + inside + inside)()

    def any_call(self, depth: int = 3, dotted: str | None = None) -> bytes:
        dotted = dotted or self.draw.choice([*self.names, *FORBIDDEN_NAMES])
        parts = [self.value(depth - 1) for _ in range(self.draw.randrange(6))]
        if self.draw.random() < 0.5:  # as many rebuild functions take them
            parts[:0] = [self.draw.choice((self.tensor, self.storage))()]
        built = self.value(depth - 1) + b"b" if self.draw.random() < 0.2 else b""
        return self.call(dotted, *parts) + built


def make_hostile_file(number: int, names: list[str]) -> bytes:
    """File `number`: a dict with a call of each allowed name in turn, in both containers of torch."""
    draw = random.Random(f"hostile pickle {number}")
    writer = RandomPickleWriter(draw, names, container := ("zip", "legacy")[number % 2])
    dotted = names[number // 2 % len(names)]
    depth = draw.randrange(1, 4)
    odd = writer.any_call(depth, dotted) if number % 3 else writer.tensor()
    rest = draw.choice((b"N", writer.doubled(b"N"), writer.value(depth - 1)))
    pickled = b"\x80\x02}(" + writer.text("a") + odd + writer.text("b") + rest + b"u."
    numbers = b"\0\0\x80\x3f" * 16
    if container == "zip":
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in (
                ("data.pkl", pickled),
                ("byteorder", b"little"),
                ("data/0", numbers),
                ("data/1", b""),
            ):
                archive.writestr(f"archive/{name}", content)
        return file.getvalue()
    keys = [key for key in ("0", "1") if key in writer.keys or draw.random() < 0.1]
    contents = {"0": struct.pack("<q", 16) + numbers, "1": struct.pack("<q", 0)}
    return LEGACY_HEADER + pickled + pickle.dumps(keys, 2) + b"".join(contents[key] for key in keys)


class TimeoutError(BaseException):  # noqa: A001
    """Not an Exception, so that no handler in between catches it."""


def main(folder: Path, count: int) -> None:
    from vitrail.base.errors import CheckpointError
    from vitrail.checkpoint.weight_files import read_raw_contents

    def overdue(*_: Any) -> None:
        raise TimeoutError(f"more than {TIME_LIMIT} s of CPU time")

    events = list[str]()
    signal.signal(signal.SIGPROF, overdue)
    torch.save({"a": torch.ones(4)}, folder / "first.pth")
    read_raw_contents(folder / "first.pth")  # imports and caches of the first use
    for number in range(20):
        (folder / "first.pth").write_bytes(make_hostile_file(number, ["torch.Tensor", "torch.FloatStorage"]))
        with suppress(CheckpointError):
            read_raw_contents(folder / "first.pth")
    names, path, done = allowed_names(), folder / "hostile.pth", 0
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit := pages * os.sysconf("SC_PAGE_SIZE") + 4 * MEMORY_SLACK, limit))
    sys.addaudithook(lambda event, _: events.append(event) if event in FORBIDDEN_EVENTS else None)
    for number in range(count):
        path.write_bytes(content := make_hostile_file(number, names))
        before, wrong, most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "", 4 * len(content) + MEMORY_SLACK
        events.clear()
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)  # CPU time: the machine may be busy
        try:
            found = read_raw_contents(path)
            done += 1
            if sum(each.numel() * each.itemsize for each in found.tensors.values()) > most:
                wrong = "more bytes than allowed"
        except CheckpointError as error:
            if len(str(error).splitlines()) != 1 or "Unable to allocate" in str(error) or "memory" in str(error):
                wrong = f"refused with {error}"
        except BaseException as error:
            wrong = f"raised {type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if events:
            wrong = f"ran {events[0]}"
        elif grown > most:
            wrong = f"took {grown} bytes for a file of {len(content)}"
        if wrong:
            sys.stdout.write(
                json.dumps({"number": number, "name": names[number // 2 % len(names)], "wrong": wrong}) + "\n"
            )
    sys.stdout.write(f"{count} pickles of {len(names)} names, {done} read\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
