"""job.json in OUT.partial: the settings of an unfinished job, which must be the same when it is resumed."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.base.errors import ConfigError, describe_error
from vitrail.base.files import is_temporary_name, read_text, write_text
from vitrail.base.json_yaml import CHECKSUM_KEY, add_checksum, parse_json, verify_and_remove_checksum
from vitrail.checkpoint.bundled import find_bundled_model
from vitrail.predict.model_checksums import compute_model_checksums, hash_texts

JOB_FILE = "job.json"
WRITER_KEY = "written by"
LEGACY_JOB_KEYS = {"model", "weights", "format", "output"}  # in a job.json of earlier versions, which lack WRITER_KEY
MAX_JOB_FILE_BYTES = 2**20


def write_job_file(folder: Path, job: Mapping[str, Any]) -> None:
    about = add_checksum({WRITER_KEY: f"vitrail {__version__}", **job})
    write_text(folder / JOB_FILE, json.dumps(about, indent=2) + "\n")


def read_job_file(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path, MAX_JOB_FILE_BYTES))
        rest = verify_and_remove_checksum(found) if isinstance(found, dict) else {}
        reason = (
            "" if rest and CHECKSUM_KEY in found else "it has no checksum: it is damaged, or from an earlier version"
        )
    except (OSError, ValueError) as error:
        rest, reason = {}, describe_error(error)
    if reason:
        raise ConfigError(f"{path} cannot be read: {reason}; use `overwrite` to start over")
    return {name: value for name, value in rest.items() if name != WRITER_KEY}


def check_same_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Refuse to resume a job with other settings than it was started with."""
    started_with = read_job_file(folder / JOB_FILE)
    for name in (*started_with, *job):
        before, now = started_with.get(name), job.get(name)
        if before != now:
            raise ConfigError(
                f"cannot resume {folder}: it was started with {name} {before!r}, not {now!r}. "
                "Use the same settings, or `overwrite` to start over."
            )


def is_job_file(path: Path) -> bool:
    """Whether a vitrail job wrote it, in this or an earlier version, even if it is damaged."""
    try:
        text = read_text(path, MAX_JOB_FILE_BYTES, errors="replace")
    except OSError:
        return False
    if f'"{WRITER_KEY}": "vitrail' in text:
        return True
    with suppress(ValueError):
        found = parse_json(text)
        return isinstance(found, dict) and set(found) >= LEGACY_JOB_KEYS
    return False


def is_temporary_job_file(name: str) -> bool:
    return is_temporary_name(name, re.escape(JOB_FILE))


def identify_model(model: str) -> dict[str, Any]:
    """Identify a model by the contents of its files; a name on the hub is compared as a name."""
    bundled, exists = find_bundled_model(model), os.path.exists(model)  # noqa: PTH110  # Path refuses a long name
    weights = hash_texts(*compute_model_checksums(model)) if exists or bundled else None
    return {"model": str(Path(model).resolve()) if exists else model, "weights": weights}
