"""Check that two versions of vitrail do the same: weights, outputs and files, number by number.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_versions.py /tmp/before . --keep /tmp/compared
    python benchmarks/compare_versions.py /tmp/before . --keep /tmp/compared --only predict,killed

The same command lines run with both checkouts, and *after* also opens and continues what *before* wrote. Wording and
figures are not compared. What *before* wrote into --keep is used again. The exit code is 1 if something differs that is
not in EXCEPTIONS.
"""

import argparse
import csv
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from compare_commands import CASES, Command, Killed
from PIL import Image

# Item, value and reason; a value is a file and its key.
EXCEPTIONS: list[tuple[str, str, str]] = []
NOT_COMPARED = {".png", ".svg", ".html", ".onnx", ".pt2", ".md", ".lock", ".pt"}  # graphs by what they predict
FREE = {  # keys that no two runs share: times, random names, checksums of files that contain them
    *("seconds", "images_per_second", "tokens_per_second", "created", "command", "checksum", "files", "save"),
    *("written by", "digest", "version"),
}
Values = dict[str, Any]


@dataclass(frozen=True)
class Result:
    line: str
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Checkout:
    """A version of vitrail, and the folder that its commands run in."""

    source: Path
    folder: Path

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        home = self.folder / "home"  # exports, measured speeds and features are cached in it
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.source / "src"),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "OMP_NUM_THREADS": "1",  # the order of a sum, and so its last bit, depends on them
            "MKL_CBWR": "AUTO,STRICT",  # and on where a tensor lies in memory
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, line: str) -> Result:
        words = shlex.split(line)
        process = self.start(words if words[0].endswith(".py") or words[0] == "-m" else ["-m", "vitrail", *words])
        out, err = process.communicate()
        return Result(line, process.returncode, out.replace(str(self.folder), "."), err)

    def kill(self, line: str, watched: str) -> str:
        """Kill it once a file that matches is not empty; why that failed, or nothing."""
        process = self.start(["-m", "vitrail", *shlex.split(line)])
        while process.poll() is None and not any(size_of(path) for path in self.folder.glob(watched)):
            time.sleep(0.002)
        process.kill()
        _, err = process.communicate()
        return "" if process.returncode == -9 else f"exit code {process.returncode} before it was killed: {err[-300:]}"

    def outputs(self, name: str) -> dict[str, Path]:
        """What has this name, by its ending."""
        found = {path.name.removeprefix(name): path for path in self.folder.glob(f"{name}*")}
        return {ending: path for ending, path in sorted(found.items()) if ending[:1] in ("", ".")}

    def values(self, name: str) -> Values:
        """All that the outputs of this name contain."""
        found = Values()
        for ending, path in self.outputs(name).items():
            for file in list_files(path):
                where = f"{ending}{str(file).removeprefix(str(path))}"
                found.update((f"{where} {key}".strip(), value) for key, value in read_values(file))
        return found


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was renamed in the meantime
        return 0


def list_files(path: Path) -> Iterator[Path]:
    """What is compared; of checkpoints nothing, since the model, the log and a resumed run tell the same."""
    skipped = {"checkpoints", "tensorboard", "figures"}
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix not in NOT_COMPARED and not skipped & set(file.parts):
            yield file


def read_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Arrays, numbers and words by their place in a file."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        yield from read_safetensors(data)
    elif path.suffix == ".npy":
        yield "", np.load(io.BytesIO(data))
    elif path.suffix == ".npz":
        yield from np.load(io.BytesIO(data)).items()
    elif path.suffix == ".pth":
        with zipfile.ZipFile(path) as archive:
            yield from ((name.partition("/")[2], archive.read(name)) for name in archive.namelist())
    elif path.suffix == ".json":
        yield from flatten(json.loads(data))
    elif path.suffix == ".jsonl":
        yield from flatten([json.loads(line) for line in data.splitlines()])
    elif path.suffix == ".csv":
        yield from flatten(list(csv.DictReader(io.StringIO(data.decode(), newline=""))))
    elif path.suffix == ".parquet":
        from pyarrow.parquet import read_table

        yield from flatten(read_table(path).to_pylist())
    else:
        yield "", data


def read_safetensors(data: bytes) -> Iterator[tuple[str, Any]]:
    start = 8 + int.from_bytes(data[:8], "little")
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in about["data_offsets"])
            kind = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "I64": np.int64}.get(
                about["dtype"], np.uint8
            )
            yield name, np.frombuffer(data[first:last], kind)


def flatten(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in FREE:
                yield from flatten(part, f"{where}.{key}")
    else:
        yield where, value


def measure_difference(before: Any, after: Any) -> float | None:
    """None if they are identical, infinity if they are not two arrays or numbers of one shape."""
    if isinstance(before, str) and isinstance(after, str):
        return None if before == after.replace("/after/", "/before/") else np.inf
    if isinstance(before, bytes | str) or isinstance(after, bytes | str):
        return None if before == after else np.inf
    if isinstance(before, int | float) and before == after:  # 1 and 1.0
        return None
    one, other = np.asarray(before), np.asarray(after)
    if one.shape != other.shape or one.dtype != other.dtype:
        return np.inf
    if one.tobytes() == other.tobytes() if one.dtype != object else before == after:
        return None
    return float(np.abs(one - other.astype(one.dtype)).max()) if one.dtype.kind in "fiu" else np.inf


class Comparison:
    """The rows of the table, and how much differs."""

    def __init__(self) -> None:
        self.differing, self.reasons, self.start = 0, set[str](), time.monotonic()
        print(f"{'seconds':>7}  {'item':28} {'compared':>8} {'identical':>9} {'excepted':>8} {'differing':>9}  largest")

    def fail(self, item: str, why: str) -> None:
        self.differing += 1
        print(f"{time.monotonic() - self.start:7.0f}  {item:28} FAILED: {' '.join(why.split())[-300:]}", flush=True)

    def compare(self, item: str, before: Values, after: Values) -> None:
        differences = dict[str, float]()
        excepted = 0
        for key in before.keys() | after.keys():
            found = measure_difference(before[key], after[key]) if key in before and key in after else np.inf
            if found is not None:
                reason = next((why for one, some, why in EXCEPTIONS if fnmatch(item, one) and fnmatch(key, some)), "")
                excepted += bool(reason)
                self.reasons |= {reason} - {""}
                differences |= {} if reason else {key: found}
        count = len(before.keys() | after.keys())
        identical = count - excepted - len(differences)
        line = (
            f"{time.monotonic() - self.start:7.0f}  {item:28} {count:8} {identical:9} {excepted:8} {len(differences):9}"
        )
        if differences:
            key = max(sorted(differences), key=differences.__getitem__)
            pair = "" if np.isfinite(differences[key]) else f": {before.get(key)!r:.80} → {after.get(key)!r:.80}"
            line += f"  {differences[key]:.1e} in {key}{pair}"
        self.differing += bool(differences) or not count
        print(line, flush=True)


def compare_command(name: str, case: Command, before: Checkout, after: Checkout, table: Comparison) -> None:
    if case.needs and case.needs not in before.run(f"{case.line.split()[0]} --help").out:
        return None
    results = [run_once(checkout, name, case, checkout == before) for checkout in (before, after)]
    for result, who in zip(results, ("before", "after"), strict=True):
        if result.code != case.code:
            return table.fail(name, f"{who} exits with {result.code}, not {case.code}: {result.err[-300:]}")
    values = [
        checkout.values(name) | {f"stdout {key}": value for key, value in read_stdout(case.stdout, result.out)}
        for checkout, result in zip((before, after), results, strict=True)
    ]
    return table.compare(name, *values)


def run_once(checkout: Checkout, name: str, case: Command, kept: bool) -> Result:
    """The result of the command, or the one that is there from an earlier comparison."""
    record = checkout.folder.parent / "results" / f"{name}.json"
    if kept and record.exists() and (result := Result(**json.loads(record.read_text()))).line == case.line:
        return result
    delete(checkout, name)
    if case.copied:
        _ = shutil.copytree(checkout.folder.parent / "before" / case.copied, checkout.folder / name)
    result = checkout.run(case.line)
    if kept:
        _ = record.write_text(json.dumps(asdict(result)))
    return result


def delete(checkout: Checkout, name: str) -> None:
    for path in checkout.outputs(name).values():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_stdout(kind: str, text: str) -> Iterator[tuple[str, Any]]:
    if kind == "json":
        yield from flatten(json.loads(text))
    elif kind:
        yield from flatten(text.splitlines())


def compare_killed(name: str, case: Killed, before: Checkout, after: Checkout, table: Comparison) -> None:
    delete(before, name)  # a job records the folder where it started, so that *after* works there, too
    failed = before.kill(case.line.replace("NAME", name), case.watched.replace("NAME", name))
    result = Checkout(after.source, before.folder).run(case.resume.replace("NAME", name))
    if failed or result.code:
        return table.fail(name, failed or result.err)
    return table.compare(name, before.values(case.whole), before.values(name))


def write_data(folder: Path, before: Checkout) -> None:
    """Some bundled images and sentences as files, and images whose class is their color."""
    random = np.random.default_rng(0)
    for name in ("color/ants", "color/bees", "color/cats", "images/below", "many"):
        (folder / name).mkdir(parents=True)
    for number in range(36):
        pixels = random.normal([60 + 40 * (number % 3), 120, 90], 40, (24 + 5 * number, 90 - number, 3))
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        image.save(folder / "color" / ("ants", "bees", "cats")[number % 3] / f"{number}.{('jpg', 'png')[number % 2]}")
        if number < 8:
            image.save(folder / "images" / "below" / f"{number}.{('jpg', 'png')[number % 2]}")
        if number < 2:
            image.convert(("L", "RGBA")[number]).save(folder / "images" / f"{number}.png")
    _ = (folder / "images" / "text.jpg").write_text("this is not an image")
    for number in range(150):
        _ = shutil.copyfile(
            folder / "images" / "below" / f"{2 * (number % 4)}.jpg", folder / "many" / f"{number:03}.jpg"
        )
    sentences = [f"{name} ist {mood}.\n" for mood in ("müde", "da", "sehr alt") for name in ("Tom", "Maria", "Er")]
    _ = (folder / "few.txt").write_text("".join(sentences[:4]))
    _ = (folder / "sentences.txt").write_text("".join(sentences * 8))
    if (written := before.run("-m vitrail.data.fashion ../data/photos")).code:
        raise SystemExit(written.err)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _ = parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    _ = parser.add_argument("after", type=Path, help="a checkout of the later version")
    _ = parser.add_argument("--keep", type=Path, required=True, help="a folder for all that is written")
    _ = parser.add_argument("--only", default="", help="comparisons whose names begin with one of NAME,NAME,…")
    options = parser.parse_args()
    work: Path = options.keep.resolve()
    before, after = (Checkout(getattr(options, name).resolve(), work / name) for name in ("before", "after"))
    for folder in (before.folder, after.folder, work / "results"):
        folder.mkdir(parents=True, exist_ok=True)
    if not (work / "data").exists():
        write_data(work / "data", before)
    script = Path(__file__).with_name("compare_models.py")
    cases = {**CASES, "models": Command(f"{script} models ../before/models/files")}
    table = Comparison()
    for name, case in cases.items():
        if name.startswith(tuple(options.only.split(","))):
            compare = compare_killed if isinstance(case, Killed) else compare_command
            compare(name, case, before, after, table)  # pyright: ignore[reportArgumentType]
    print(*sorted(table.reasons), f"{table.differing} items differ or failed", sep="\n")
    raise SystemExit(1 if table.differing else 0)


if __name__ == "__main__":
    main()
