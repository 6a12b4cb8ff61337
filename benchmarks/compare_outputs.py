"""Compare files that two versions of vitrail wrote: their numbers and names, not their wording.

Every function returns the first difference in words, or "" where there is none.
"""

import csv
import io
import json
import re
import zipfile
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

# Figures and pages have captions; a graph has the names of classes inside, and is compared by what it predicts.
NOT_COMPARED = {".png", ".svg", ".html", ".onnx", ".pt2", ".md", ".lock"}
# Keys that may differ, by file, or by the command that prints JSON: times, random names, the command line, and what was
# added after 19e0726 on purpose (see the CHANGELOG): checksums, assumptions, teacher_fields by --teacher-set, threads,
# and the task of a run with its settings, which were settings of the recipe before.
FREE = {
    "run.json": {
        *("created", "command", "checksum", "teacher_fields", "threads"),
        *("task", "keep_best", "schedules", "stop_on_collapse"),
        *("distill", "distill_token", "teacher_weight", "temperature"),  # now in `task`
    },
    "config.json": {
        "save",
        "checksum",
        "files",
        "digest",
    },  # digest: of an export, 19e0726 hashes the weights otherwise
    "log.jsonl": {"seconds", "images_per_second"},
    "evaluation.json": {"seconds"},
    "eval": {"seconds"},
    "compare": {"seconds"},
    "runs": {
        *("seconds", "model", "init", "teacher", "created", "config", "epoch", "loss", "accuracy"),
        *("train_loss", "train_accuracy"),
    },
    "inspect-checkpoint": {"checksums", "assumed"},
}
WORDS = ".error"  # why a file could not be read: that there is a reason is compared, not its wording


def compare_paths(before: Path, after: Path) -> str:
    if not before.is_dir():
        return compare_files(before, after)
    names = [compared_files(folder) for folder in (before, after)]
    if names[0] != names[1]:
        return f"{before.name}: files {sorted(set(names[0]) ^ set(names[1]))} in one of the two only"
    return next(filter(None, (compare_files(before / name, after / name) for name in names[0])), "")


def compared_files(folder: Path) -> list[str]:
    """All that is compared in a folder; of checkpoints the last, since earlier ones are written as time allows."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in NOT_COMPARED]
    last = {path.parent: path for path in files if path.parent.name == "checkpoints"}
    return [
        str(path.relative_to(folder))
        for path in files
        if last.get(path.parent, path) == path and path.parent.name != "tensorboard" and path.name != ".lock"
    ]


def compare_files(before: Path, after: Path) -> str:
    try:
        found = compare_content(before, after)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        found = f"cannot be read: {error}"
    return f"{after.parent.name}/{after.name}: {found}" if found else ""


def compare_content(before: Path, after: Path) -> str:
    kind, free = before.suffix, FREE.get(before.name, set())
    if kind in NOT_COMPARED:
        return ""
    one, other = before.read_bytes(), after.read_bytes()
    if kind == ".safetensors":
        return compare_tensors(tensors_in(one), tensors_in(other))
    if kind in (".npz", ".pth"):  # both are zip files, with times inside
        return compare_tensors(members_of(before), members_of(after))
    if kind == ".npy":  # answers of a teacher have a checksum after the array
        arrays = [np.load(path) for path in (before, after)]
        return compare_tensors(*({"array": (str(each.dtype), each.shape, each.tobytes())} for each in arrays))
    if kind == ".json":
        return compare_json_text(one, other, free)
    if kind == ".jsonl":
        return compare_json(list(map(json.loads, one.splitlines())), list(map(json.loads, other.splitlines())), free)
    if kind == ".csv":
        return compare_json(rows_of(one.decode()), rows_of(other.decode()))
    if kind == ".parquet":
        return compare_json(parquet_rows(before), parquet_rows(after))
    return "" if one == other else f"{len(one)} and {len(other)} bytes that are not the same"


def compare_json_text(before: str | bytes, after: str | bytes, free: Set[str]) -> str:
    try:
        return compare_json(json.loads(before), json.loads(after), free)
    except ValueError as error:
        return f"not JSON: {error}"


def compare_json(before: Any, after: Any, free: Set[str] = frozenset(), where: str = "") -> str:
    """Values, and the order of keys, without those that may differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [[key for key in each if key not in free] for each in (before, after)]
        if keys[0] != keys[1]:
            return f"{where} has the keys {keys[0]} before, {keys[1]} after"
        pairs = [(f"{where}.{key}", before[key], after[key]) for key in keys[0]]
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{where} has {len(before)} entries before, {len(after)} after"
        pairs = [(f"{where}[{n}]", one, other) for n, (one, other) in enumerate(zip(before, after, strict=True))]
    elif where.endswith(WORDS):
        return "" if bool(before) == bool(after) else f"{where} is {before!r} before, {after!r} after"
    else:
        return (
            ""
            if repr(before) == repr(after).replace("/after/", "/before/")
            else f"{where} is {before!r} before, {after!r} after"
        )
    return next(filter(None, (compare_json(one, other, free, name) for name, one, other in pairs)), "")


def compare_tensors(before: dict[str, Any], after: dict[str, Any]) -> str:
    if list(before) != list(after):
        return f"other names: {sorted(set(before) ^ set(after)) or 'in another order'}"
    for name, (kind, shape, data) in before.items():
        if (kind, shape) != after[name][:2]:
            return f"{name} is {kind} {shape} before, {after[name][0]} {after[name][1]} after"
        if data != after[name][2]:
            return f"{name} {difference_of_bytes(kind, data, after[name][2])}"
    return ""


def difference_of_bytes(kind: str, before: bytes, after: bytes) -> str:
    if kind not in ("F32", "float32") or len(before) != len(after):
        return f"differs, {len(before)} and {len(after)} bytes"
    one, other = np.frombuffer(before, np.float32), np.frombuffer(after, np.float32)
    return f"differs in {np.sum(one != other)} of {len(one)} numbers, by up to {np.abs(one - other).max():.1e}"


def tensors_in(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Of a safetensors file, whose metadata may differ."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    for name, about in sorted(header.items()):
        first, last = (start + offset for offset in about["data_offsets"])
        tensors[name] = about["dtype"], about["shape"], data[first:last]
    return tensors


def members_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Of a zip file, without the name of the file that torch puts in front."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        return {name.removeprefix(f"{path.stem}/"): ("bytes", [], archive.read(name)) for name in names}


def rows_of(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def parquet_rows(path: Path) -> list[Any]:
    from pyarrow.parquet import read_table

    table: Any = read_table(path)
    return [str(table.schema.remove_metadata()), table.to_pylist()]


def compare_numbers(before: str, after: str) -> str:
    """Of a text whose words may change."""
    one, other = (re.findall(r"\d+(?:[.,:]\d+)*", text) for text in (before, after))
    return compare_lists(one, other)


def compare_text(before: str, after: str) -> str:
    return compare_lists(before.splitlines(), after.splitlines())


def compare_lists(before: Sequence[str], after: Sequence[str]) -> str:
    pairs = zip(before, after, strict=False)
    apart = next(((one, other) for one, other in pairs if one != other), None)
    if apart:
        return f"stdout has {apart[0]!r} before, {apart[1]!r} after"
    return "" if len(before) == len(after) else f"stdout has {len(before)} entries before, {len(after)} after"
