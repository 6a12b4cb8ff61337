"""A new process that starts, answers one batch and says how much memory that took: `python -m vitrail.study.cold`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.models.checks import pair
from vitrail.study.contenders import Way, noise, step_of

STATUS = Path("/proc/self/status")
MORE = 2  # answers after the first, before memory is read


@dataclass(frozen=True)
class Start:
    seconds: float  # from nothing to the first answer
    megabytes: float  # resident at most


class StartError(VitrailError):
    """The process ended without an answer."""


def start(way: Way, batch: int, imports: Sequence[str] = ()) -> Start:
    """Runs a way in a process of its own, which first imports the modules named."""
    told = {**asdict(way), "folder": str(way.folder), "batch": batch, "imports": list(imports)}
    begun = perf_counter()
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as said,  # a pipe that nobody reads could fill
        subprocess.Popen(
            [sys.executable, "-P", "-m", "vitrail.study.cold", json.dumps(told)],  # -P: nothing is imported from here
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        seconds = perf_counter() - begun
        rest = process.stdout.read()
        code = process.wait()
        said.seek(0)
        reason = said.read().strip().splitlines() or [f"exit code {code}"]
    if code or not rest:
        raise StartError(f"{way.label} did not start in a process of its own: {reason[-1][:200]}")
    return Start(seconds, float(rest))


def peak() -> float:
    """The largest resident set so far, in megabytes.

    Linux tells it of this program alone; getrusage goes on from the process that started it, which may be larger.
    """
    if STATUS.exists():
        line = next(line for line in STATUS.read_text("utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def main() -> None:
    """Two lines: the first when there is an answer, the second with the megabytes."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    for name in told["imports"]:
        import_module(name)
    how = Preprocessing().changed(told["preprocessing"])
    way = Way(
        name=told["name"],
        folder=Path(told["folder"]),
        preprocessing=how,
        threads=told["threads"],
        streams=told["streams"],
    )
    step = step_of(way, noise((told["batch"], *pair(how.image_size), len(how.mean))))
    step()
    sys.stdout.write("answered\n")
    sys.stdout.flush()
    for _ in range(MORE):
        step()
    sys.stdout.write(f"{peak()}\n")


if __name__ == "__main__":
    main()
