"""Check that two versions of vitrail do the same: weights, predictions and files, byte by byte.

    git worktree add /tmp/before 19e0726
    python benchmarks/compare_versions.py --before /tmp/before --after .
    python benchmarks/compare_versions.py --before /tmp/before --after . --only cifar,predict --keep /tmp/compared

The same command lines run with both checkouts, each in a folder of its own, on small generated data. What *before* has
trained, saved, exported and left unfinished is also opened by *after*. Wording and figures are not compared. Exits with
code 1 if anything differs.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from compare_commands import COMPARISONS, Case, Command, Interruption, public_weights, write_data
from compare_outputs import FREE, compare_json_text, compare_numbers, compare_paths, compare_text

THREADS = "2"  # the order of a sum, and so its last bit, depends on them
TIMEOUT = 300.0  # seconds of one command


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Checkout:
    """A version of vitrail, and the folder that its commands run in."""

    source: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        home = self.folder / "home"  # exports, measured speeds and downloads are cached in it
        return {
            **os.environ,
            "PYTHONPATH": str(self.source / "src"),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "MPLCONFIGDIR": str(self.folder.parent / "matplotlib"),
            "OMP_NUM_THREADS": THREADS,
            "OMP_WAIT_POLICY": "passive",  # the two versions run side by side
            # Else the last bit depends on where a tensor lies in memory, and 19e0726 mapped weights from their file.
            "MKL_CBWR": "AUTO,STRICT",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        words = command.split()
        if "--threads" in help_text(self, words[0]) and not (words[0] in ("train", "distill") and "--resume" in words):
            words += ["--threads", THREADS]  # a run that is resumed keeps its own
        return subprocess.Popen(
            [sys.executable, "-m", "vitrail", *words],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str) -> Result:
        process = self.start(command)
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        return Result(process.returncode, out.replace(str(self.folder), "."), err)

    def interrupt(self, command: str, watched: str, number: signal.Signals) -> str:
        """Send the signal once a file that matches `watched` is not empty; why that failed, or nothing."""
        process = self.start(command)
        end = time.monotonic() + TIMEOUT
        while process.poll() is None and not self.has(watched):
            time.sleep(0.002)
            if time.monotonic() > end:
                process.kill()
                return f"{watched} was not written within {TIMEOUT:.0f} s"
        process.send_signal(number)
        _, err = process.communicate(timeout=TIMEOUT)
        expected = -number if number == signal.SIGKILL else 128 + number
        return "" if process.returncode == expected else f"exit code {process.returncode}, not {expected}: {err[-300:]}"

    def has(self, watched: str) -> bool:
        """Whether a file that matches is there and not empty; it may be renamed in the meantime."""
        with suppress(FileNotFoundError):
            return any(path.stat().st_size for path in self.folder.glob(watched))
        return False


@cache
def help_text(checkout: Checkout, command: str) -> str:
    words = [sys.executable, "-m", "vitrail", command, "--help"]
    return subprocess.run(words, env=checkout.environment(), capture_output=True, text=True, check=True).stdout


def compare_command(name: str, command: Command, before: Checkout, after: Checkout) -> str:
    """Run it with both versions at once, and return the first difference, or nothing."""
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(Checkout.run, (before, after), (command.line,) * 2))
    for result, who in zip(results, ("before", "after"), strict=True):
        if result.code not in (command.code, 2 * command.code):  # 2 if images cannot be read, 1 until 19e0726
            return f"{who} exits with {result.code}, not {command.code}: {result.err[-300:]}"
    if any(word.split(".")[0] == name for word in command.line.split()[1:]) and not outputs(before.folder, name):
        return f"{command.line} has written nothing"  # a comparison of nothing with nothing would be equal
    return compare_stdout(command, results[0].out, results[1].out) or compare_named(before, name, after, name)


def compare_stdout(command: Command, before: str, after: str) -> str:
    if command.stdout == "json":
        return compare_json_text(before, after, FREE.get(command.line.split()[0], set()))
    if command.stdout == "numbers":
        return compare_numbers(before, after)
    return compare_text(before, after) if command.stdout else ""


def compare_named(one: Checkout, name: str, other: Checkout, other_name: str) -> str:
    """Compare all that has this name, with whatever ending."""
    before, after = outputs(one.folder, name), outputs(other.folder, other_name)
    if list(before) != list(after):
        return f"writes {list(before)} before, {list(after)} after"
    return next(filter(None, (compare_paths(before[ending], after[ending]) for ending in before)), "")


def outputs(folder: Path, name: str) -> dict[str, Path]:
    """What has this name, by what follows it."""
    found = {path.name.removeprefix(name): path for path in sorted(folder.glob(f"{name}*"))}
    return {ending: path for ending, path in found.items() if ending == "" or ending.startswith(".")}


def compare_interruption(name: str, case: Interruption, before: Checkout, after: Checkout) -> Iterator[tuple[str, str]]:
    """Interrupt both versions, resume each by itself, and *before* also by *after*; all must equal the whole one."""
    line, watched = (text.replace("NAME", name) for text in (case.line, case.watched))
    with ThreadPoolExecutor(2) as pool:
        interrupted = [pool.submit(checkout.interrupt, line, watched, case.signal) for checkout in (before, after)]
        for failed in (each.result() for each in interrupted):
            if failed:
                yield f"{name}: interrupted", failed
                return
        taken, moved = f"before-{name}", replace(after, folder=before.folder)  # a job records the folder it started in
        for ending, path in outputs(before.folder, name).items():
            place = before.folder / f"{taken}{ending}"
            _ = shutil.copytree(path, place) if path.is_dir() else shutil.copy2(path, place)
        refused = is_earlier_job(before.folder, taken)
        attempts = ((before, name), (after, name), (moved, taken))
        resumed = [pool.submit(checkout.run, case.resume.replace("NAME", stem)) for checkout, stem in attempts]
        results = [each.result() for each in resumed]
    labels = ("before resumed by itself", "after resumed by itself", "before resumed by after")
    for (checkout, stem), result, label in zip(attempts, results, labels, strict=True):
        if stem == taken and refused and result.code == 2:
            # The CHANGELOG says so: an OUT.partial of an earlier version cannot be resumed, only overwritten.
            yield f"{name}: {label} is refused, as it should be", ""
        elif result.code:
            yield f"{name}: {label}", f"exit code {result.code}: {result.err[-300:]}"
        else:
            yield f"{name}: {label}", compare_named(before, case.whole, checkout, stem)


def is_earlier_job(folder: Path, name: str) -> bool:
    """Whether this is an unfinished prediction job of 19e0726, whose job.json does not say who wrote it."""
    return any("written by" not in json.loads(path.read_text()) for path in folder.glob(f"{name}.*.partial/job.json"))


def select(cases: dict[str, Case], only: str) -> dict[str, Case]:
    """Comparisons whose names begin with one of these words, and those whose outputs they read."""
    names = {name for name in cases if name.startswith(tuple(only.split(",")))}
    if not names:
        raise SystemExit(f"no comparison begins with {only}; expected some of {', '.join(cases)}")
    for name, case in reversed(cases.items()):
        if name in names:
            words = f"{case.line} {case.whole}" if isinstance(case, Interruption) else case.line
            names |= {word.split(".")[0] for word in re.split(r"[\s/]+", words)}
    return {name: case for name, case in cases.items() if name in names}


def check_source(checkout: Checkout) -> None:
    """A package that is installed elsewhere would be compared with itself."""
    words = [sys.executable, "-c", "import vitrail; print(vitrail.__file__)"]
    done = subprocess.run(words, env=checkout.environment(), capture_output=True, text=True, check=False)
    if not done.stdout.startswith(str(checkout.source)):
        raise SystemExit(
            f"{checkout.source} has no package of its own: {done.stdout or done.stderr}; expected a checkout"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier version")
    parser.add_argument("--after", type=Path, required=True, help="a checkout of the later version")
    parser.add_argument("--only", default="", help="comparisons whose names begin with one of NAME,NAME,…")
    parser.add_argument("--keep", type=Path, help="a new folder for all that is written; else it is deleted")
    parser.add_argument("--data", type=Path, help="a folder with public weights, which are read and run as well")
    options = parser.parse_args()
    cases = select({**COMPARISONS, **(public_weights(options.data) if options.data else {})}, options.only)
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.keep or Path(temporary)).resolve()
        before, after = (Checkout(getattr(options, name).resolve(), work / name) for name in ("before", "after"))
        for checkout in (before, after):
            checkout.folder.mkdir(parents=True)
            check_source(checkout)
        write_data(work / "data")
        raise SystemExit(1 if compare_all(cases, before, after) else 0)


def compare_all(cases: dict[str, Case], before: Checkout, after: Checkout) -> int:
    """Print a line for each comparison; returns how many differ."""
    start, counts = time.perf_counter(), Counter[str]()
    for number, name in enumerate(cases, 1):
        for label, difference in compare(name, cases[name], before, after):
            verdict = "skipped" if difference is None else "DIFFERS" if difference else "ok"
            counts[verdict] += 1
            detail = f": {' '.join(difference.split())}" if difference else ""
            seconds = time.perf_counter() - start
            print(f"[{number:3}/{len(cases)} {seconds:4.0f} s] {verdict:7}  {label}{detail}", flush=True)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "DIFFERS", "skipped")))
    return counts["DIFFERS"]


def compare(name: str, case: Case, before: Checkout, after: Checkout) -> Iterator[tuple[str, str | None]]:
    """The comparisons of one name, each with its first difference, "" if there is none, or None if it is skipped."""
    if isinstance(case, Interruption):
        yield from compare_interruption(name, case, before, after)
    elif "moco" in name and "moco" not in help_text(before, "convert"):
        yield f"{name}: 19e0726 does not have this layout", None
    else:
        yield name, compare_command(name, case, before, after)


if __name__ == "__main__":
    main()
