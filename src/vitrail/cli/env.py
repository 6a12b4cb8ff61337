"""vitrail env: versions, machine and settings, for bug reports; and completion scripts for shells."""

import json
import os
import platform
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from vitrail import __version__
from vitrail.base import machine
from vitrail.base.text import format_count
from vitrail.cli.options import model_flags as flags

PACKAGES = ("torch", "numpy", "pillow", "safetensors", "matplotlib", "huggingface_hub", "cyclopts", "rich", "pyyaml")
EXTRAS = {  # optional packages: the extra that installs them, or none
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
    "pyarrow": "embed",
    "tensorboard": "log",
    "simplejpeg": "fast",
    **dict.fromkeys(("tokenizers", "sacrebleu"), "text"),
    "ctranslate2": "ctranslate2",
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "uvloop", "prometheus-client"), "serve"),
    **dict.fromkeys(("timm", "transformers", "torchvision"), None),
}
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def env(*, completion: Literal["bash", "zsh", "fish"] | None = None, as_json: flags.Json = False) -> None:
    """Show versions and hardware, for a bug report, or print a completion script.

    The report has no names of users or hosts and no tokens; folders below the home folder start with ~.

    With a completion script, the Tab key completes commands and options. Load it when the shell starts. bash: add eval
    "$(vitrail env --completion bash)" to ~/.bashrc. zsh: write the script to a file _vitrail in a folder of $fpath.
    fish: write it to ~/.config/fish/completions/vitrail.fish.

    Examples::

        vitrail env
        vitrail env --json
        vitrail env --completion bash

    Parameters
    ----------
    completion
        Print the completion script for this shell instead. [default: the report]
    """
    if completion is not None:
        from vitrail.cli import build_app

        print(build_app().generate_completion(shell=completion))
        return
    sections = {
        "Versions": {"vitrail": __version__, "python": platform.python_version()}
        | dict(map(describe_package, PACKAGES)),
        "Optional packages": dict(describe_package(*each) for each in EXTRAS.items()),
        "Machine": machine.describe_hardware(),
        "Caches": describe_caches(),
        "Variables": {name: os.environ.get(name, "not set") for name in VARIABLES},
    }
    if as_json:
        print(json.dumps(sections, indent=2))
        return
    for title, facts in sections.items():
        print("\n".join((title, *(f"  {name:<21}{value}" for name, value in facts.items()))))


def describe_package(name: str, extra: str | None = None) -> tuple[str, str]:
    """Its name and its version, or the extra that installs it."""
    try:
        return name, version(name)
    except PackageNotFoundError:
        return name, "not installed" if extra is None else f"not installed; part of the extra {extra}"


def describe_caches() -> dict[str, str]:
    """The folders of vitrail and huggingface_hub with their sizes."""
    from vitrail.base.files import get_cache_folder

    folders = {"vitrail": get_cache_folder()}
    with suppress(ImportError):  # not needed where only exported models run
        folders["huggingface_hub"] = Path(import_module("huggingface_hub.constants").HF_HUB_CACHE)
    return {name: f"{hide_home(path)}, {describe_size(path)}" for name, path in folders.items()}


def describe_size(folder: Path) -> str:
    if not folder.is_dir():
        return "does not exist"
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return f"{sum(path.stat().st_size for path in files) / 1e6:,.1f} MB in {format_count(len(files), 'file')}"


def hide_home(path: Path) -> str:
    """The path with ~ for the home folder; a path elsewhere may contain names, so only its end is shown."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else f"…/{path.name}"
