"""Verify the checksums of the files of a model, a run or an export."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import check_regular_file, file_checksum, read_text
from vitrail.base.json_yaml import CHECKSUM_KEY as JSON_CHECKSUM_KEY
from vitrail.base.json_yaml import parse_json, verify_and_remove_checksum
from vitrail.checkpoint.checksums import CHECKSUM_KEY, matches_header_checksum
from vitrail.checkpoint.run_files import CHECKPOINTS_FOLDER, MODEL_FOLDER, is_run_folder
from vitrail.checkpoint.weight_files import read_weight_file
from vitrail.checkpoint.weight_folders import CONFIG_FILE

CHECKSUMMED_NAME = re.compile(r"(config|run)\.json|.*\.safetensors")
ChecksumVerdict = Literal["intact", "damaged", "no checksum"]


@dataclass(frozen=True)
class FileCheck:
    """One file and whether it matches its checksum; `reason` explains damage."""

    file: str
    verdict: ChecksumVerdict
    reason: str = ""


def verify_checksums(place: Path) -> tuple[FileCheck, ...]:
    """Check every file of a folder that may have a checksum, or a single file."""
    if not place.is_dir():
        return tuple(verify_file(place, place.name))
    folders = [place, *(place / name for name in (CHECKPOINTS_FOLDER, MODEL_FOLDER) if is_run_folder(place))]
    files = [each for folder in folders if folder.is_dir() for each in sorted(folder.iterdir())]
    candidates = [each for each in files if CHECKSUMMED_NAME.fullmatch(each.name)]
    return tuple(check for each in candidates for check in verify_file(each, str(each.relative_to(place))))


def verify_file(path: Path, name: str) -> Iterator[FileCheck]:
    """Check a file, and the files whose checksums it lists."""
    try:
        check_regular_file(path.stat())
        if path.suffix == ".json":
            yield from verify_json_and_listed_files(path, name)
        elif path.suffix == ".safetensors":
            yield FileCheck(name, verify_weights(path))
        else:
            yield FileCheck(name, "no checksum")
    except (CheckpointError, OSError, ValueError, SafetensorError) as error:
        yield FileCheck(name, "damaged", describe_error(error))


def verify_json_and_listed_files(path: Path, name: str) -> Iterator[FileCheck]:
    data: Any = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise CheckpointError("it is not a JSON object")
    verify_and_remove_checksum(data)
    yield FileCheck(name, "intact" if JSON_CHECKSUM_KEY in data else "no checksum")
    listed = data.get("files") if path.name == CONFIG_FILE else None
    for other, expected in (listed if isinstance(listed, dict) else {}).items():
        if Path(other).name != other:
            raise CheckpointError(f"it lists {other!r}, which is outside its folder")
        same = file_checksum(path.with_name(other)) == expected
        where = str(Path(name).with_name(other))
        yield FileCheck(where, "intact") if same else FileCheck(where, "damaged", f"it does not match {name}")


def verify_weights(path: Path) -> ChecksumVerdict:
    with safe_open(path, "pt") as file:  # the header alone: public files have no checksum and may be large
        if CHECKSUM_KEY not in (file.metadata() or {}):
            return "no checksum"
    contents = read_weight_file(path)
    if not matches_header_checksum(contents.tensors, contents.header):
        raise CheckpointError("the weights do not match their checksum")
    return "intact"
