"""Identify a model by the contents of its files, for caches and unfinished jobs."""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from vitrail.base.errors import VitrailError
from vitrail.base.files import file_checksum
from vitrail.checkpoint.weight_folders import find_bundled_model
from vitrail.export.description import CONFIG_FILE, find_onnx_file, is_exported, read_folder_description
from vitrail.export.onnx_session import external_data_path

WEIGHT_SUFFIXES = (".safetensors", ".onnx", ".data", ".pt2", ".bin", ".pth", ".pt", ".npz")


def compute_model_checksums(model: str | Path) -> list[str]:
    """SHA-256 of each file and of config.json; empty if there are none.

    An export has its checksums in config.json; they are verified when it is opened. Other files are read, about one
    second per gigabyte.
    """
    place = find_bundled_model(model) or Path(model)
    if is_exported(place):
        about = read_folder_description(place)
        found = compute_onnx_checksums(find_onnx_file(place), {} if about is None else about.files)
        return found if about is None else [*found, hash_texts(about.to_json())]
    if place.is_file():
        return [file_checksum(place)]
    folders = [each for each in (place, place / "model") if each.is_dir()]
    files = sorted(path for folder in folders for path in folder.iterdir() if is_weights_or_config(path))
    return [f"{path.relative_to(place)} {file_checksum(path)}" for path in files]


def compute_onnx_checksums(file: Path, known: Mapping[str, str]) -> list[str]:
    """SHA-256 of an ONNX file and of the .data file next to it: from `known`, otherwise by reading them."""
    return [known.get(each.name) or file_checksum(each) for each in (file, external_data_path(file)) if each.exists()]


def is_weights_or_config(path: Path) -> bool:
    return (path.suffix in WEIGHT_SUFFIXES or path.name == CONFIG_FILE) and path.is_file()


def hash_texts(*texts: str) -> str:
    """A digest of the texts, usable as a file name."""
    return sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:32]


def compute_model_key(model: str | Path) -> str:
    """A digest of the model's files, or the model's name if it has none."""
    try:
        found = compute_model_checksums(model)
    except (OSError, VitrailError):
        found = []
    return hash_texts(*found) if found else str(model)


def identify_model(model: str) -> dict[str, Any]:
    """For job.json: a model by the contents of its files; a name on the hub is compared as a name."""
    bundled, exists = find_bundled_model(model), os.path.exists(model)  # noqa: PTH110  # Path refuses a long name
    weights = hash_texts(*compute_model_checksums(model)) if exists or bundled else None
    return {"model": str(Path(model).resolve()) if exists else model, "weights": weights}
