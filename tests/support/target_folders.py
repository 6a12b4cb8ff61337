"""Folders of `vitrail export --for`, around an export that is written once for all tests."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

from support.toy_exports import ExportFinder

from vitrail.export.description import ExportDescription
from vitrail.export.targets.table import write_for_target

WriteTarget = Callable[..., tuple[Path, list[str]]]


def make_target_writer(exported: ExportFinder, parent: Path) -> WriteTarget:
    """A function that writes a target and returns the folder and the lines for the user."""

    def write(target: str, source: str = "onnx", name: str = "Toy_2", **options: Any) -> tuple[Path, list[str]]:
        def export(folder: Path) -> ExportDescription:
            copytree(exported(source), folder)
            return ExportDescription.from_json((folder / "config.json").read_text(), str(folder))

        return parent / name, write_for_target(target, parent / name, export, **options)

    return write
