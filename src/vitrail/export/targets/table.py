"""The targets of `vitrail export --for`, and how their folders are written: completely or not at all."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.base.errors import CheckpointError, ConfigError, unknown_name_error
from vitrail.export.atomic_folder import write_folder_atomically
from vitrail.export.description import ExportDescription
from vitrail.export.targets.container import write_container
from vitrail.export.targets.deployment import Deployment, name_deployment
from vitrail.export.targets.kserve import write_kserve
from vitrail.export.targets.kubernetes import write_kubernetes
from vitrail.export.targets.ray_serve import write_ray
from vitrail.export.targets.triton import write_triton
from vitrail.export.targets.web import find_runtime, write_web


@dataclass(frozen=True)
class Target:
    model: str  # folder of the exported model, in which {name} is that of the deployment
    use: str  # what to do with the folder
    writers: tuple[Callable[[Deployment], list[str]], ...]  # of files; each returns lines for the user
    needs: Callable[[Path | None], object] | None = None  # raises an error before the model is read


TARGETS: Mapping[str, Target] = {
    "triton": Target("{name}/1", "tritonserver --model-repository {folder}", (write_triton,)),
    "kserve": Target(
        "repository/{name}/1", "kubectl apply -f {folder}/inferenceservice.yaml", (write_triton, write_kserve)
    ),
    "kubernetes": Target("model", "kubectl apply -f {folder}/kubernetes.yaml", (write_container, write_kubernetes)),
    "ray": Target("model", "cd {folder} && PYTHONPATH=$PWD serve run serve_config.yaml", (write_ray,)),
    "web": Target(
        "model", "python -m http.server --directory {folder}, or any static host", (write_web,), find_runtime
    ),
    "container": Target("model", "docker build -t {name} {folder}", (write_container,)),
}


def write_for_target(
    target: str,
    folder: Path,
    export: Callable[[Path], ExportDescription],
    *,
    overlay: dict[str, Any] | None = None,
    runtime: Path | None = None,
    note: Callable[[str], object] = print,
) -> list[str]:
    """Write the exported model and the files of a target into a new folder; lines for the user."""
    check_target(target, folder, runtime)
    about, name = TARGETS[target], name_deployment(folder)
    with write_folder_atomically(folder, overwrite=False) as place:
        model = place / about.model.format(name=name)
        made = Deployment(
            name=name,
            folder=place,
            model=model,
            about=export(model),
            overlay=overlay or {},
            runtime=runtime,
            note=note,
        )
        lines = [line for write in about.writers for line in write(made)]
    return [*lines, f"use it: {about.use.format(name=name, folder=folder)}"]


def check_target(target: str, folder: Path, runtime: Path | None) -> None:
    """Refuse what cannot be written, before a model is read."""
    if target not in TARGETS:
        raise unknown_name_error("target", target, TARGETS)
    if runtime is not None and target != "web":
        raise ConfigError(f"`web_runtime` with `for_target` {target}; expected it with web")
    needs = TARGETS[target].needs
    if needs is not None:
        needs(runtime)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} already exists; `for_target` writes a new folder: choose another name, or remove it"
        )
