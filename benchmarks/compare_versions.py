"""Check that two versions of vitrail do the same: weights, outputs and files, number by number.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_versions.py /tmp/before . --keep /tmp/compared
    python benchmarks/compare_versions.py /tmp/before . --keep /tmp/compared --only predict,killed

The same command lines run with both checkouts, and *after* also opens and continues what *before* wrote. Wording and
figures are not compared. What *before* wrote into --keep is used again; --keep/differences has a table per item. The
exit code is 1 if something differs that is not in EXCEPTIONS.
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
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from compare_commands import CASES, Command
from PIL import Image
from safetensors.numpy import load

# Item, value and reason; a value is a file and its key.
EXCEPTIONS: list[tuple[str, str, str]] = [
    ("*", "/run.json *precision", "a run is told to choose its precision, and writes what it chose"),
    ("*", "*config.json .kind", "the folder of a model names its kind"),
    ("*", "*config.json .format", "the folder of a model names its kind"),
    ("probe*", "*few_shot.1.*", "one-shot probes standardize by all training images"),
    ("probe*", "*.1-shot", "one-shot probes standardize by all training images"),
]
NOT_COMPARED = {".png", ".svg", ".html", ".onnx", ".pt2", ".md", ".lock", ".pt"}  # graphs by what they predict
SKIPPED = {"checkpoints", "tensorboard", "figures"}  # the model, the log and a resumed run tell the same
FREE = {  # keys that no two runs share: times, random names, checksums of files that contain them
    *(
        "seconds",
        "images_per_second",
        "tokens_per_second",
        "sentences_per_second",
        "created",
        "until",
        "command",
        "checksum",
        "files",
        "save",
    ),
    *("written by", "digest", "version"),
}
Values = dict[str, Any]


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
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, *words], cwd=self.folder, env=environment, text=True, **options)

    def run(self, line: str) -> dict[str, Any]:
        words = shlex.split(line)
        process = self.start(words if words[0].endswith(".py") or words[0] == "-m" else ["-m", "vitrail", *words])
        out, err = process.communicate()
        return {"line": line, "code": process.returncode, "out": out.replace(str(self.folder), "."), "err": err}

    def kill(self, line: str, watched: str) -> str:
        """Kill it once a file that matches is not empty; why that failed, or nothing."""
        process = self.start(["-m", "vitrail", *shlex.split(line)])
        while process.poll() is None and not any(is_written(path) for path in self.folder.glob(watched)):
            time.sleep(0.002)
        process.kill()
        _, err = process.communicate()
        return "" if process.returncode == -9 else f"exit code {process.returncode} before it was killed: {err[-300:]}"

    def outputs(self, name: str) -> dict[str, Path]:
        """What has this name, by its ending."""
        found = {path.name.removeprefix(name): path for path in self.folder.glob(f"{name}*")}
        return {ending: path for ending, path in sorted(found.items()) if ending[:1] in ("", ".")}

    def delete(self, name: str) -> None:
        for path in self.outputs(name).values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def values(self, name: str) -> Values:
        """All that the outputs of this name contain."""
        found = Values()
        for ending, path in self.outputs(name).items():
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file() and file.suffix not in NOT_COMPARED and not SKIPPED & set(file.parts):
                    where = f"{ending}{str(file).removeprefix(str(path))}"
                    found |= {f"{where} {key}".strip(): value for key, value in read_values(file)}
        return found


def is_written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # it was renamed in the meantime
        return False


def read_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Arrays, numbers and words by their place in a file."""
    data = path.read_bytes()
    match path.suffix:
        case ".safetensors":
            yield from load(data).items()
        case ".npy":
            yield "", np.load(io.BytesIO(data))
        case ".npz":
            yield from np.load(io.BytesIO(data)).items()
        case ".pth":
            with zipfile.ZipFile(path) as archive:
                yield from ((name.partition("/")[2], archive.read(name)) for name in archive.namelist())
        case ".json":
            yield from flatten(json.loads(data))
        case ".jsonl":
            yield from flatten([json.loads(line) for line in data.splitlines()])
        case ".csv":
            yield from flatten(list(csv.DictReader(io.StringIO(data.decode(), newline=""))))
        case ".parquet":
            from pyarrow.parquet import read_table

            yield from flatten(read_table(path).to_pylist())
        case _:
            yield "", data


def flatten(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in FREE:
                yield from flatten(part, f"{where}.{key}")
    else:
        yield where, value


def read_stdout(kind: str, text: str) -> Values:
    if not kind:
        return {}
    lines = [" ".join(line.replace(" %", "%").split()) for line in text.splitlines()]  # columns are wording
    return {f"stdout {key}": value for key, value in flatten(json.loads(text) if kind == "json" else lines)}


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

    def __init__(self, folder: Path) -> None:
        self.folder, self.differing, self.reasons, self.start = folder, 0, set[str](), time.monotonic()
        print(f"{'seconds':>7}  {'item':28} {'compared':>8} {'excepted':>8} {'differing':>9}  largest")

    def print_row(self, item: str, rest: str) -> None:
        print(f"{time.monotonic() - self.start:7.0f}  {item:28} {rest}", flush=True)

    def fail(self, item: str, why: str) -> None:
        self.differing += 1
        self.print_row(item, f"FAILED: {' '.join(why.split())[-300:]}")

    def compare(self, item: str, before: Values, after: Values) -> None:
        differences, excepted = dict[str, float](), 0
        for key in sorted(before.keys() | after.keys()):
            found = measure_difference(before[key], after[key]) if key in before and key in after else np.inf
            if found is not None:
                reasons = {why for one, some, why in EXCEPTIONS if fnmatch(item, one) and fnmatch(key, some)}
                excepted += bool(reasons)
                self.reasons |= reasons
                differences |= {} if reasons else {key: found}
        lines = [
            f"{key}\t{size:.1e}\t{before.get(key)!r:.300}\t{after.get(key)!r:.300}\n"
            for key, size in differences.items()
        ]
        _ = (self.folder / f"{item}.tsv").write_text("".join(lines))
        count, largest = len(before.keys() | after.keys()), max(differences, key=differences.__getitem__, default="")
        rest = f"{count:8} {excepted:8} {len(differences):9}"
        if largest:
            pair = f"{before.get(largest)!r:.80} → {after.get(largest)!r:.80}"
            rest += f"  {differences[largest]:.1e} in {largest}: {' '.join(pair.split())}"
        self.differing += bool(differences) or not count
        self.print_row(item, rest)


def compare_command(name: str, case: Command, before: Checkout, after: Checkout, table: Comparison) -> None:
    found = list[Values]()
    for checkout in (before, after):
        result = run_or_read(checkout, name, case, checkout == before)
        if result["code"] != case.code:
            return table.fail(name, f"{checkout.folder.name} exits with {result['code']}: {result['err'][-300:]}")
        found.append(checkout.values(name) | read_stdout(case.stdout, result["out"]))
    return table.compare(name, *found)


def run_or_read(checkout: Checkout, name: str, case: Command, kept: bool) -> dict[str, Any]:
    """The result of the command, or the one that is there from an earlier comparison."""
    record = checkout.folder.parent / "results" / f"{name}.json"
    if kept and record.exists() and (result := json.loads(record.read_text()))["line"] == case.line:
        return result
    checkout.delete(name)
    if case.copied:
        _ = shutil.copytree(checkout.folder.parent / "before" / case.copied, checkout.folder / name)
    result = checkout.run(case.line)
    if kept:
        _ = record.write_text(json.dumps(result))
    return result


def compare_killed(name: str, case: Command, before: Checkout, after: Checkout, table: Comparison) -> None:
    """*after* resumes where *before* was killed, in the same folder, since a job records where it started."""
    before.delete(name)
    failed = before.kill(case.line, case.killed_at)
    result = Checkout(after.source, before.folder).run(case.resume)
    if failed or result["code"]:
        return table.fail(name, failed or result["err"])
    return table.compare(name, before.values(case.whole), before.values(name))


def write_data(folder: Path, before: Checkout) -> None:
    """Images whose class is their color, sentences, and some bundled images as files."""
    random = np.random.default_rng(0)
    for name in ("color/ants", "color/bees", "color/cats", "images/below", "many"):
        (folder / name).mkdir(parents=True)
    for number in range(36):
        pixels = random.normal([60 + 40 * (number % 3), 120, 90], 40, (24 + 5 * number, 90 - number, 3))
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        name = f"{number}.{('jpg', 'png')[number % 2]}"
        image.save(folder / "color" / ("ants", "bees", "cats")[number % 3] / name)
        if number < 8:
            image.save(folder / "images" / "below" / name)
        if number < 2:
            image.convert(("L", "RGBA")[number]).save(folder / "images" / f"{number}.png")
    _ = (folder / "images" / "text.jpg").write_text("this is not an image")
    for number in range(150):
        source = folder / "images" / "below" / f"{2 * (number % 4)}.jpg"
        _ = shutil.copyfile(source, folder / "many" / f"{number:03}.jpg")
    sentences = [f"{name} ist {mood}.\n" for mood in ("müde", "da", "sehr alt") for name in ("Tom", "Maria", "Er")]
    _ = (folder / "few.txt").write_text("".join(sentences[:4]))
    _ = (folder / "sentences.txt").write_text("".join(sentences * 8))
    if (written := before.run("-m vitrail.data.fashion ../data/photos"))["code"]:
        raise SystemExit(written["err"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _ = parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    _ = parser.add_argument("after", type=Path, help="a checkout of the later version")
    _ = parser.add_argument("--keep", type=Path, required=True, help="a folder for all that is written")
    _ = parser.add_argument("--only", default="", help="comparisons whose names begin with one of NAME,NAME,…")
    options = parser.parse_args()
    work: Path = options.keep.resolve()
    before, after = (Checkout(getattr(options, name).resolve(), work / name) for name in ("before", "after"))
    for folder in (before.folder, after.folder, work / "results", work / "differences"):
        folder.mkdir(parents=True, exist_ok=True)
    if not (work / "data").exists():
        write_data(work / "data", before)
    script = Path(__file__).with_name("compare_models.py")
    cases = {**CASES, "models": Command(f"{script} models ../before/models/files")}
    table = Comparison(work / "differences")
    for name, case in cases.items():
        if name.startswith(tuple(options.only.split(","))):
            (compare_killed if case.killed_at else compare_command)(name, case, before, after, table)
    print(*sorted(table.reasons), f"{table.differing} items differ or failed", sep="\n")
    raise SystemExit(1 if table.differing else 0)


if __name__ == "__main__":
    main()
