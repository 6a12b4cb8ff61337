"""An exported model in the folder of a target: what the files around it are written from."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.export.description import ONNX_DATA_FILE, ONNX_FILE, ExportDescription
from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import pair

CORES = 2  # of a replica, as the files are written; their reader changes it
MAX_NAME = 50  # characters; Kubernetes allows 63, and -token is added


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """`folder` is the temporary one: nothing is visible before all files are written and checked."""

    name: str  # of the model, in routes, images and resources
    folder: Path
    model: Path  # within the folder
    about: ExportDescription
    overlay: dict[str, Any] = field(default_factory=dict[str, Any])  # what the explorer says about the model
    runtime: Path | None = None  # of onnxruntime-web
    note: Callable[[str], object] = print

    @property
    def tag(self) -> str:
        """Name and version of a container image."""
        return f"{self.name}:{self.about.digest[:12] or 'latest'}"

    @property
    def megabytes(self) -> float:
        """Size of the model."""
        files = (self.model / each for each in (ONNX_FILE, ONNX_DATA_FILE))
        return sum(each.stat().st_size for each in files if each.exists()) / 1e6

    @property
    def input_shape(self) -> list[int]:
        """Rows, columns and channels; -1 is any."""
        sides = [-1, -1] if self.about.multiple else list(pair(self.about.preprocessing.image_size))
        return [*sides, len(self.about.preprocessing.mean)]

    def read_output_shape(self) -> list[int]:
        """Of one image; -1 is any."""
        shape: Sequence[Any] = ExportedModel(self.model).session.get_outputs()[0].shape[1:]
        return [each if isinstance(each, int) else -1 for each in shape]

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def name_deployment(folder: Path) -> str:
    """The last part of a path as a name that Kubernetes, Triton and Docker accept."""
    plain = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:MAX_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"model-{plain}".strip("-")
