"""Count what commands do: frames, files, opens and `stat` calls, for one or more checkouts.

    python benchmarks/trace_commands.py /tmp/before . --weights deit.pth --translator runs/text
    python benchmarks/trace_commands.py /tmp/before . --speed

Frames are calls in vitrail's files, in all threads. Of these files, `imported` counts those whose module is executed,
`used` those of which a function runs. Opens are those of the weights for reading, and `stat` calls those of vitrail's
functions. CPU seconds are the best of five processes. With --speed instead, the training speed of the second checkout
relative to the first, in pairs: two processes train by turns, on one thread in float32, and count CPU seconds, so that
other work on the machine counts little.
"""

import argparse
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import redirect_stdout
from inspect import CO_NEWLOCALS
from pathlib import Path
from typing import Any

FLOAT32 = "--precision float32 --epochs 0.5"
SHORT = "--seed 1 --threads 1 --workers 0"
TRACES = {  # the line, and what the path of the weights contains
    "predict": ("predict {weights} {photo}", "{weights}"),
    "train --init": (f"train --data photos --init {{weights}} --batch 20 --epochs 0.1 {SHORT} -o run", "{weights}"),
    "pretrain mae": (f"pretrain mae --data photos --batch 100 --epochs 0.5 {SHORT} -o mae", "{weights}"),
    "translate": ("translate {translator} words.txt --length 12", "{translator}"),
    "explain": ("explain {weights} {photo} -o explained", "{weights}"),
    "export": ("export {weights} shipped", "{weights}"),
}
SPEEDS = {  # a model that takes time, and one that waits for images
    "training step": "--set image_size=32 --set patch_size=4 --set width=64 --set heads=4 --set depth=4",
    "loader": "--set image_size=32 --set patch_size=16 --set width=8 --set heads=2 --set depth=2 --policy rand",
}
PATHS = ("pathlib.py", "genericpath.py", "posixpath.py", "<frozen os>")


def trace(words: list[str], weights: str, out: Path) -> None:
    """Run the command line in this process, and write its counts."""
    counts, imported, used = Counter[str](), set[str](), set[str]()

    def on_event(frame: Any, event: str, called: Any) -> None:
        path, code = frame.f_code.co_filename, frame.f_code
        if event == "call" and "/vitrail/" in path:
            counts["frames"] += 1
            if code.co_name == "<module>":
                imported.add(path)
            elif code.co_flags & CO_NEWLOCALS:  # not the body of a class
                used.add(path)
        elif event == "c_call" and called.__name__ in ("stat", "lstat", "fstat"):
            while frame and frame.f_code.co_filename.endswith(PATHS):
                frame = frame.f_back
            counts["stat"] += bool(frame) and "/vitrail/" in frame.f_code.co_filename

    def on_audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and weights in str(arguments[0]) and str(arguments[0]).endswith((".pth", ".safetensors")):
            counts["opens"] += not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)

    sys.addaudithook(on_audit)
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    sys.argv = ["vitrail", *words]
    try:
        _ = runpy.run_module("vitrail", run_name="__main__", alter_sys=True)
    finally:  # it ends with SystemExit
        sys.setprofile(None)
        _ = out.write_text(json.dumps({**counts, "imported": sorted(imported), "used": sorted(used)}))


def run_by_cpu_clock() -> None:
    """Run each command line that is read, and print its exit code; clocks, those of the log too, count CPU seconds."""
    time.monotonic = time.perf_counter = time.process_time
    from vitrail.cli import main

    for line in sys.stdin:
        sys.argv = ["vitrail", *json.loads(line)]
        try:
            with redirect_stdout(sys.stderr):
                main()
        except SystemExit as end:
            print(end.code, flush=True)


def make_environment(source: Path, folder: Path) -> dict[str, str]:
    home = str(folder / "home")
    environment = {**os.environ, "PYTHONPATH": str(source.resolve() / "src"), "HOME": home, "OMP_NUM_THREADS": "1"}
    return environment | {"XDG_CACHE_HOME": home, "PYTHONPYCACHEPREFIX": f"{home}/bytecode", "HF_HUB_OFFLINE": "1"}


def run(source: Path, folder: Path, words: list[str]) -> float:
    """The CPU seconds of a process in the folder, which must succeed."""
    environment = make_environment(source, folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = [sys.executable, *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{source}: {' '.join(words)}: {done.stderr[-1000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report_counts(sources: list[Path], folder: Path, given: dict[str, str], lists: Path | None) -> None:
    print(f"{'command':14} {'frames':>9} {'imported':>8} {'used':>6} {'opens':>6} {'stat':>6}  checkout")
    for name, (line, weights) in TRACES.items():
        for number, source in enumerate(sources):
            inside = Path(tempfile.mkdtemp(dir=folder))
            (inside / "photos").symlink_to(folder / "photos")
            _ = (inside / "words.txt").write_text("Tom ist müde.\n")
            traced = ["--trace", "counts", weights.format(**given), *line.format(**given).split()]
            _ = run(source, inside, [__file__, *traced])
            found = json.loads((inside / "counts").read_text())
            files = [len(found["imported"]), len(found["used"])]
            figures = f"{found['frames']:9,} {files[0]:8} {files[1]:6} {found.get('opens', 0):6} {found['stat']:6}"
            print(f"{name:14} {figures}  {source}", flush=True)
            if lists:
                _ = (lists / f"{number}-{name}.json").write_text(json.dumps(found, indent=1))
    for line in ("predict {weights} {photo}", "--help"):
        for source in sources:
            words = ["-m", "vitrail", *line.format(**given).split()]
            seconds = min(run(source, folder, words) for _ in range(5))
            print(f"{line.split()[0]:14} {seconds:.2f} CPU seconds  {source}", flush=True)


def start_runner(source: Path, folder: Path) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    line = [sys.executable, __file__, "--cpu-clock"]
    return subprocess.Popen(line, cwd=folder, env=make_environment(source, folder), text=True, bufsize=1, **pipes)


def ask(process: subprocess.Popen[str], words: list[str]) -> None:
    """Let a runner run a command line, which must succeed."""
    assert process.stdin is not None
    assert process.stdout is not None
    _ = process.stdin.write(f"{json.dumps(words)}\n")
    code = process.stdout.readline().strip()
    if code != "0":
        raise SystemExit(f"{' '.join(words)}: exit code {code or process.wait()}")


def report_speed(sources: list[Path], folder: Path, pairs: int) -> None:
    processes = {source: start_runner(source, folder) for source in sources}
    for name, model in SPEEDS.items():
        line = f"train --recipe scratch --data fashion --model vit_tiny_patch16_224 {model} --batch 100 {SHORT}"
        ratios = list[float]()
        for pair in range(pairs + 1):
            speeds = dict[Path, float]()
            for source in sources if pair % 2 else sources[::-1]:
                out = Path(tempfile.mkdtemp(dir=folder), "run")
                ask(processes[source], [*line.split(), *FLOAT32.split(), "-o", str(out)])
                rows = [json.loads(row) for row in (out / "log.jsonl").read_text().splitlines()]
                key = "images_per_second"
                speeds[source] = statistics.median(row[key] for row in rows if key in row)
            if pair:  # the first one warms up
                ratios.append(speeds[sources[1]] / speeds[sources[0]])
        print(f"{name}: {statistics.median(ratios):.3f}, median of {pairs}; {sorted(ratios)}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--trace"]:
        return trace(sys.argv[4:], sys.argv[3], Path(sys.argv[2]))
    if sys.argv[1:2] == ["--cpu-clock"]:
        return run_by_cpu_clock()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _ = parser.add_argument("checkouts", type=Path, nargs="+", help="for --speed two: before and after")
    models = {"weights": "cct_cifar10", "photo": "example:cat", "translator": "transformer_tatoeba"}
    for name, default in models.items():
        _ = parser.add_argument(f"--{name}", default=default, help=f"a path or a name [default: {default}]")
    _ = parser.add_argument("--speed", action="store_true", help="compare training speed instead")
    _ = parser.add_argument("--pairs", type=int, default=20)
    _ = parser.add_argument("--lists", type=Path, help="a folder for the lists of files")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in models}
    given = {name: str(Path(value).resolve()) if Path(value).exists() else value for name, value in given.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _ = run(options.checkouts[0], folder, ["-m", "vitrail.data.fashion", "photos"])
        if options.speed:
            return report_speed(options.checkouts, folder, options.pairs)
        return report_counts(options.checkouts, folder, given, options.lists)


if __name__ == "__main__":
    main()
