"""The results of a study on disk: JSON and text files, and the environment of a measurement."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.base.files import make_folder, write_text
from vitrail.base.machine import describe_machine

PACKAGES = ("torch", "onnxruntime", "numpy", "timm", "transformers")


def collect_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "vitrail": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Environment:
    """Machine, versions of packages and time of a measurement."""

    machine: str = field(default_factory=describe_machine)
    versions: Mapping[str, str] = field(default_factory=collect_versions)
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"{self.machine}; {', '.join(f'{name} {number}' for name, number in self.versions.items())}"

    def to_json(self) -> dict[str, Any]:
        return {"vitrail": __version__, "when": self.when, "machine": self.machine, "versions": dict(self.versions)}


def format_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def write_texts_to_folder(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each text to the file of its name in the folder; returns the paths."""
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
