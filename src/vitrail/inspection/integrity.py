"""Verifies the checksums of the files of a model, a run or an export."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from vitrail.checkpoint.checksums import CHECKSUM, is_intact
from vitrail.checkpoint.contents import CONFIG, read_file
from vitrail.errors import CheckpointError, one_line
from vitrail.files import check_regular, file_checksum, read_text
from vitrail.parsing import CHECKSUM as ENTRY
from vitrail.parsing import parse_json, without_checksum

RUN = "run.json"
BELOW = ("checkpoints", "model")  # folders of a run
SIGNED = re.compile(r"(config|run)\.json|.*\.safetensors")
Verdict = Literal["intact", "damaged", "no checksum"]


@dataclass(frozen=True)
class FileCheck:
    """One file and whether it matches its checksum; `reason` explains damage."""

    file: str
    verdict: Verdict
    reason: str = ""


def is_run(place: Path) -> bool:
    return (place / RUN).is_file()


def verify(place: Path) -> tuple[FileCheck, ...]:
    """Checks every file of a folder that may carry a checksum, or a single file."""
    if not place.is_dir():
        return tuple(verify_file(place, place.name))
    folders = [place, *(place / name for name in BELOW if is_run(place))]
    files = [each for folder in folders if folder.is_dir() for each in sorted(folder.iterdir())]
    signed = [each for each in files if SIGNED.fullmatch(each.name)]
    return tuple(check for each in signed for check in verify_file(each, str(each.relative_to(place))))


def verify_file(path: Path, name: str) -> Iterator[FileCheck]:
    """Checks the file, and those whose checksums it lists."""
    try:
        check_regular(path.stat())
        if path.suffix == ".json":
            yield from verify_json(path, name)
        elif path.suffix == ".safetensors":
            yield FileCheck(name, verify_weights(path))
        else:
            yield FileCheck(name, "no checksum")
    except (CheckpointError, OSError, ValueError, SafetensorError) as error:
        yield FileCheck(name, "damaged", one_line(error))


def verify_json(path: Path, name: str) -> Iterator[FileCheck]:
    data: Any = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise CheckpointError("it does not hold a JSON object")
    without_checksum(data)
    yield FileCheck(name, "intact" if ENTRY in data else "no checksum")
    listed = data.get("files") if path.name == CONFIG else None
    for other, expected in (listed if isinstance(listed, dict) else {}).items():
        if Path(other).name != other:
            raise CheckpointError(f"it lists {other!r}, which is outside its folder")
        same = file_checksum(path.with_name(other)) == expected
        where = str(Path(name).with_name(other))
        yield FileCheck(where, "intact") if same else FileCheck(where, "damaged", f"it does not match {name}")


def verify_weights(path: Path) -> Verdict:
    with safe_open(path, "pt") as file:  # only the header: public files have no checksum and may be large
        if CHECKSUM not in (file.metadata() or {}):
            return "no checksum"
    contents = read_file(path)
    if not is_intact(contents.tensors, contents.header):
        raise CheckpointError("the weights do not match their checksum")
    return "intact"
