"""Count what commands do: frames, files, opens and `stat` calls, for one or more checkouts.

    python benchmarks/trace_commands.py /tmp/before . --weights deit_tiny_patch16_224.pth --photo photo.jpg
    python benchmarks/trace_commands.py /tmp/before . --speed

Frames are calls of functions of vitrail in all threads, files the modules of vitrail that are executed; opens are those
of the model's weights for reading; `stat` calls those of vitrail's functions. CPU seconds are the best of five
processes. With --speed instead, training speed of the second checkout relative to the first, in 20 alternating pairs.
"""

import argparse
import json
import os
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

SHORT = "--seed 1 --threads 1 --workers 0"
TRACES = {  # command line and what the path of the weights contains
    "predict": ("predict {weights} {photo}", "{weights}"),
    "train --init": (f"train --data photos --init {{weights}} --batch 20 --epochs 0.1 {SHORT} -o run", "{weights}"),
    "pretrain mae": (f"pretrain mae --data photos --batch 100 --epochs 0.5 {SHORT} -o mae", "{weights}"),
    "translate": ("translate transformer_tatoeba Tom\xa0ist\xa0müde.", "transformer_tatoeba"),
    "explain": ("explain {weights} {photo} -o explained", "{weights}"),
    "export": ("export {weights} shipped", "{weights}"),
}
SPEEDS = {  # a model that takes time, and one that waits for images
    "training step": "--model vit_tiny_patch16_224 --set image_size=32 --set patch_size=4 --set width=64",
    "loader": "--model vit_tiny_patch16_224 --set image_size=32 --set patch_size=16 --set width=8 --policy rand",
}


def trace(words: list[str], weights: str, out: Path) -> None:
    """Run the command line in this process, and write its counts."""
    counts, files = Counter[str](), set[str]()

    def on_event(frame: Any, event: str, called: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "/vitrail/" in path:
            counts["frames"] += 1
            if frame.f_code.co_name == "<module>":
                files.add(path)
        elif event == "c_call" and called.__name__ in ("stat", "lstat", "fstat"):
            while frame and frame.f_code.co_filename.endswith(
                ("pathlib.py", "genericpath.py", "posixpath.py", "<frozen os>")
            ):
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
        _ = out.write_text(json.dumps({**counts, "files": len(files)}))


def run(source: Path, folder: Path, words: list[str]) -> float:
    """The CPU seconds of a process in the folder, which must succeed."""
    home = folder / "home"
    environment = {**os.environ, "PYTHONPATH": str(source.resolve() / "src"), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPYCACHEPREFIX": str(home / "bytecode"), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{source}: {' '.join(words)}: {done.stderr[-1000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def split(line: str, given: dict[str, str]) -> list[str]:
    return [word.format(**given).replace("\xa0", " ") for word in line.split(" ")]


def report_counts(sources: list[Path], folder: Path, given: dict[str, str]) -> None:
    print(f"{'command':14} {'frames':>9} {'files':>6} {'opens':>6} {'stat':>6}  checkout")
    for name, (line, weights) in TRACES.items():
        for source in sources:
            for left in ("run", "mae", "explained", "shipped"):
                shutil.rmtree(folder / left, ignore_errors=True)
            _ = run(source, folder, [__file__, "--trace", "counts", weights.format(**given), *split(line, given)])
            found = Counter(json.loads((folder / "counts").read_text()))
            figures = f"{found['frames']:9,} {found['files']:6} {found['opens']:6} {found['stat']:6}"
            print(f"{name:14} {figures}  {source}", flush=True)
    for line in ("predict {weights} {photo}", "--help"):
        for source in sources:
            seconds = min(run(source, folder, ["-m", "vitrail", *split(line, given)]) for _ in range(5))
            print(f"{line.split()[0]:14} {seconds:.2f} CPU seconds  {source}", flush=True)


def report_speed(sources: list[Path], folder: Path, pairs: int) -> None:
    for name, model in SPEEDS.items():
        ratios = list[float]()
        for pair in range(pairs):
            speeds = dict[Path, float]()
            for source in sources if pair % 2 else sources[::-1]:
                shutil.rmtree(folder / "run", ignore_errors=True)
                line = f"train --recipe scratch --data fashion --batch 100 --epochs 1 {SHORT} {model} -o run"
                _ = run(source, folder, ["-m", "vitrail", *line.split()])
                rows = [json.loads(row) for row in (folder / "run" / "log.jsonl").read_text().splitlines()]
                speeds[source] = statistics.median(
                    row["images_per_second"] for row in rows if "images_per_second" in row
                )
            ratios.append(speeds[sources[1]] / speeds[sources[0]])
        print(
            f"{name}: {statistics.median(ratios):.3f} of the speed of {sources[0]}, median of {pairs}; {sorted(ratios)}"
        )


def main() -> None:
    if sys.argv[1:2] == ["--trace"]:
        return trace(sys.argv[4:], sys.argv[3], Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _ = parser.add_argument("checkouts", type=Path, nargs="+", help="for --speed two: before and after")
    _ = parser.add_argument("--weights", default="cct_cifar10", help="a checkpoint, such as DeiT's .pth")
    _ = parser.add_argument("--photo", default="example:cat")
    _ = parser.add_argument("--speed", action="store_true", help="compare training speed instead")
    _ = parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    given = {
        name: str(Path(value).resolve()) if Path(value).exists() else value
        for name, value in (("weights", options.weights), ("photo", options.photo))
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _ = run(options.checkouts[0], folder, ["-m", "vitrail.data.fashion", "photos"])
        if options.speed:
            return report_speed(options.checkouts, folder, options.pairs)
        return report_counts(options.checkouts, folder, given)


if __name__ == "__main__":
    main()
