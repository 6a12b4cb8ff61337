"""Measure start-up and peak memory in a new process: `python -m vitrail.study.bench_startup`."""

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

from vitrail.base.errors import VitrailError
from vitrail.base.machine import PROCESS_STATUS_FILE, read_resident_bytes
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checks import pair
from vitrail.study.bench_engines import BenchEngine, make_predict_step, random_pixels

EXTRA_PREDICTIONS = 2  # after the first, before memory is read


@dataclass(frozen=True)
class StartupMeasurement:
    seconds: float  # from starting the process to the first prediction
    megabytes: float  # peak resident memory


class StartupError(VitrailError):
    """The process ended without a prediction."""


def measure_startup(engine: BenchEngine, batch: int, imports: Sequence[str] = ()) -> StartupMeasurement:
    """Run an engine in a new process, which first imports the given modules."""
    job = {**asdict(engine), "folder": str(engine.folder), "batch": batch, "imports": list(imports)}
    start = perf_counter()
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,  # an unread pipe could fill up
        subprocess.Popen(
            # -P: import nothing from the current folder
            [sys.executable, "-P", "-m", "vitrail.study.bench_startup", json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        seconds = perf_counter() - start
        rest = process.stdout.read()
        code = process.wait()
        stderr.seek(0)
        reason = stderr.read().strip().splitlines() or [f"exit code {code}"]
    if code or not rest:
        raise StartupError(f"{engine.label} did not start in a new process: {reason[-1][:200]}")
    return StartupMeasurement(seconds, float(rest))


def read_peak_memory() -> float:
    """Peak resident memory in megabytes.

    On Linux from /proc: getrusage includes the process that started this one, which may have been larger.
    """
    if PROCESS_STATUS_FILE.exists():
        return read_resident_bytes("VmHWM") / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def measure_inside_child_process() -> None:
    """Print one line after the first prediction, and one with the peak memory in megabytes."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    for name in job["imports"]:
        import_module(name)
    preprocessing = Preprocessing().with_fields(job["preprocessing"])
    engine = BenchEngine(
        name=job["name"],
        folder=Path(job["folder"]),
        preprocessing=preprocessing,
        threads=job["threads"],
        streams=job["streams"],
    )
    shape = (job["batch"], *pair(preprocessing.image_size), len(preprocessing.mean))
    step = make_predict_step(engine, random_pixels(shape))
    step()
    sys.stdout.write("predicted\n")
    sys.stdout.flush()
    for _ in range(EXTRA_PREDICTIONS):
        step()
    sys.stdout.write(f"{read_peak_memory()}\n")


if __name__ == "__main__":
    measure_inside_child_process()
