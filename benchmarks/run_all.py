"""Run every benchmark of `make bench`, one after another: their tables go into docs/results.md and docs/benchmarks.md.

    make bench

Each runs in its own process with few rounds, all of them within 30 minutes of an idle machine with two cores. Progress
is printed. A benchmark that fails, takes too long or would start too late is named at once and at the end, its section
stays as it was, and the exit code is 1.
"""

import os
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated

from cyclopts import Parameter, run
from results_page import describe_cpu, write_section

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks"
RESULTS, PREDICTION = ROOT / "docs" / "results.md", ROOT / "docs" / "benchmarks.md"
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
ALIVE_SECONDS = 60  # between lines that say that a benchmark still runs


@dataclass(frozen=True)
class Benchmark:
    """A command, its page and the longest time that it may take."""

    command: str
    minutes: float
    page: Path = RESULTS
    keeps_memory: bool = True  # the C allocator keeps freed memory, without which large steps vary by a third


BENCHMARKS = (  # the most important first, in case that time runs out
    Benchmark("precision.py --rounds 4", 6),
    Benchmark("throughput.py --rounds 5", 4),
    Benchmark("prediction.py --only engines --rounds 5", 5, PREDICTION),
    Benchmark("prediction.py --only cold --rounds 4", 5, PREDICTION, keeps_memory=False),
    Benchmark("prediction.py --only folder --rounds 2", 6, PREDICTION, keeps_memory=False),
    Benchmark("families.py --rounds 2", 7),
    Benchmark("pretraining_steps.py --rounds 2", 4),
    Benchmark("decoding.py --rounds 3", 3, keeps_memory=False),
    Benchmark("checkpoint_loading.py --rounds 3", 3, keeps_memory=False),
    Benchmark("image_pipeline.py --rounds 5 --files 64", 2, keeps_memory=False),
    Benchmark("distillation.py --rounds 7", 2),
    Benchmark("inspection.py --rounds 10 --images 100", 3),
    Benchmark("prediction.py --only accuracy --images 1000", 4, PREDICTION, keeps_memory=False),
    Benchmark("deit_variants.py --rounds 2", 3),
    Benchmark("prediction.py --only variants --rounds 2", 4, PREDICTION),
)


def make_environment(each: Benchmark) -> dict[str, str]:
    paths = (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    return environment | KEEP_FREED_MEMORY if each.keeps_memory else environment


def run_benchmark(each: Benchmark, seconds: float) -> str:
    """Run it for at most this long, with its output as it comes; return what went wrong."""
    script, *options = shlex.split(each.command)
    words = [sys.executable, str(SCRIPTS / script), *options, "--page", str(each.page)]
    start = monotonic()
    with subprocess.Popen(words, env=make_environment(each), cwd=ROOT, process_group=0) as process:
        try:
            while (passed := monotonic() - start) < seconds:
                try:
                    code = process.wait(min(ALIVE_SECONDS, seconds - passed))
                except subprocess.TimeoutExpired:
                    print(f"{each.command}: {(monotonic() - start) / 60:.1f} minutes", flush=True)
                    continue
                return f"exit code {code}" if code else ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
    return f"stopped after {seconds / 60:.1f} minutes"


def read_children_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(
    *,
    minutes: Annotated[float, Parameter(help="When to stop.")] = 30,
    only: Annotated[str, Parameter(help="Part of the commands to run.")] = "",
) -> None:
    """Run the benchmarks and write both pages."""
    chosen = [each for each in BENCHMARKS if only in each.command]
    for page in (RESULTS, PREDICTION):
        write_section(page, "machine", f"The tables of `make bench` were last measured on: {describe_cpu()}.")
    start, failures, spent = monotonic(), list[str](), read_children_seconds()
    for number, each in enumerate(chosen, 1):
        left = 60 * minutes - (monotonic() - start)
        print(
            f"\n[{number} of {len(chosen)}, {minutes - left / 60:.1f} of {minutes:g} minutes] {each.command}",
            flush=True,
        )
        failure = run_benchmark(each, min(60 * each.minutes, left)) if left > 0 else "not started: no time is left"
        now, spent = spent, read_children_seconds()
        print(f"{each.command}: {(spent - now) / 60:.1f} CPU minutes", flush=True)
        if failure:
            failures.append(f"{each.command}: {failure}")
            print(f"FAILED {failures[-1]}", flush=True)
    print(f"\n{len(chosen) - len(failures)} of {len(chosen)} benchmarks in {(monotonic() - start) / 60:.1f} minutes")
    if failures:
        raise SystemExit("\n".join(("These failed, and their sections were not changed:", *failures)))


if __name__ == "__main__":
    run(main)
