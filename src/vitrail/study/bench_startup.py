"""Start a new process, predict one batch, report its peak memory: `python -m vitrail.study.bench_startup`."""

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
from vitrail.study.bench_engines import BenchEngine, make_predict_step, random_pixels

PROCESS_STATUS_FILE = Path("/proc/self/status")
EXTRA_PREDICTIONS = 2  # answers after the first, before memory is read


@dataclass(frozen=True)
class StartupMeasurement:
    seconds: float  # from nothing to the first answer
    megabytes: float  # resident at most


class StartupError(VitrailError):
    """The process ended without an answer."""


def measure_startup(way: BenchEngine, batch: int, imports: Sequence[str] = ()) -> StartupMeasurement:
    """Runs a way in a process of its own, which first imports the modules named."""
    told = {**asdict(way), "folder": str(way.folder), "batch": batch, "imports": list(imports)}
    begun = perf_counter()
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as said,  # a pipe that nobody reads could fill
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "vitrail.study.bench_startup",
                json.dumps(told),
            ],  # -P: nothing is imported from here
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
        raise StartupError(f"{way.label} did not start in a process of its own: {reason[-1][:200]}")
    return StartupMeasurement(seconds, float(rest))


def read_peak_memory() -> float:
    """The largest resident set so far, in megabytes.

    Linux tells it of this program alone; getrusage goes on from the process that started it, which may be larger.
    """
    if PROCESS_STATUS_FILE.exists():
        line = next(line for line in PROCESS_STATUS_FILE.read_text("utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def run_child_process() -> None:
    """Two lines: the first when there is an answer, the second with the megabytes."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    for name in told["imports"]:
        import_module(name)
    how = Preprocessing().with_fields(told["preprocessing"])
    way = BenchEngine(
        name=told["name"],
        folder=Path(told["folder"]),
        preprocessing=how,
        threads=told["threads"],
        streams=told["streams"],
    )
    step = make_predict_step(way, random_pixels((told["batch"], *pair(how.image_size), len(how.mean))))
    step()
    sys.stdout.write("answered\n")
    sys.stdout.flush()
    for _ in range(EXTRA_PREDICTIONS):
        step()
    sys.stdout.write(f"{read_peak_memory()}\n")


if __name__ == "__main__":
    run_child_process()
