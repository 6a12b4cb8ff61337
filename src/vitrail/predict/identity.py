"""Identifies a model by the contents of its files, for caches and unfinished jobs."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from vitrail.export.exported import CONFIG, description_in, is_exported, model_file
from vitrail.export.session import data_file
from vitrail.files import file_checksum

WEIGHTS = (".safetensors", ".onnx", ".data", ".pt2", ".bin", ".pth", ".pt", ".npz")


def contents_of(model: str | Path) -> list[str]:
    """SHA-256 of each file and of config.json; empty if there are none.

    For an export, the checksums in its config.json, which are verified when it is opened. Any other files are read,
    about one second per gigabyte.
    """
    place = Path(model)
    if is_exported(place):
        about = description_in(place)
        found = onnx_contents(model_file(place), {} if about is None else about.files)
        return found if about is None else [*found, short_key(about.to_json())]
    if place.is_file():
        return [file_checksum(place)]
    folders = [each for each in (place, place / "model") if each.is_dir()]
    files = sorted(path for folder in folders for path in folder.iterdir() if is_part(path))
    return [f"{path.relative_to(place)} {file_checksum(path)}" for path in files]


def onnx_contents(file: Path, known: Mapping[str, str]) -> list[str]:
    """SHA-256 of an ONNX file and of the .data file next to it: from `known`, otherwise by reading them."""
    return [known.get(each.name) or file_checksum(each) for each in (file, data_file(file)) if each.exists()]


def is_part(path: Path) -> bool:
    return (path.suffix in WEIGHTS or path.name == CONFIG) and path.is_file()


def short_key(*texts: str) -> str:
    """A digest of the texts, usable as a file name."""
    return sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:32]
