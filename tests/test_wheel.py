"""The wheel has every data file, and what it installs works outside the repository with the core packages only."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.core_environment import ROOT, link_core_packages, run_in_core_environment

PACKAGE = ROOT / "src" / "vitrail"
COMMANDS = (
    "models vit_t*",
    "predict vit_fashion example:coffee --top 1",
    "eval vit_fashion --batch 250",
    "explain vit_fashion example:cat -o explained",
    "summary vit_fashion",
    "train --epochs 0.02 --threads 1 -o run",
)
PROGRAM = """
import sys
from vitrail.cli import build_app
import vitrail
print(vitrail.__file__, flush=True)
for words in sys.argv[1:]:
    build_app()(words.split(), exit_on_error=False, print_error=False, result_action="return_value")
"""


def run_pip(*words: object) -> None:
    line = [sys.executable, "-m", "pip", *map(str, words), "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_pip("wheel", ROOT, "--no-build-isolation", "--wheel-dir", folder)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run_pip("install", wheel, "--target", folder)
    return folder


def test_the_wheel_installs_every_file_of_the_package(installed: Path) -> None:
    def list_files(folder: Path) -> set[str]:
        files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)) for path in files}

    files = list_files(installed / "vitrail")
    assert files == list_files(PACKAGE)
    for needed in (
        "py.typed",
        "models/costs.json",
        "models/families.json",
        "recipes/fashion.yaml",
        "data/photos/cat.jpg",
    ):
        assert needed in files
    assert {"data/text/tatoeba/pairs.tsv.gz", "data/text/tatoeba/LICENSE"} <= files
    assert (installed / "bin" / "vitrail").exists()


def test_the_wheel_names_the_licences_of_what_it_bundles(installed: Path) -> None:
    (folder,) = installed.glob("vitrail-*.dist-info")
    text = (folder / "METADATA").read_text("utf-8")
    assert "License-Expression: Apache-2.0 AND MIT AND LicenseRef-CC-BY-2.0-FR\n" in text
    for place in ("", "data/fashion/", "data/text/tatoeba/"):
        own = (PACKAGE / place / "LICENSE" if place else ROOT / "LICENSE").read_bytes()
        assert own in [path.read_bytes() for path in (folder / "licenses").rglob("LICENSE")]


def test_commands_run_outside_the_repository_with_the_core_packages(installed: Path, tmp_path: Path) -> None:
    packages, where = tmp_path / "packages", tmp_path / "somewhere"
    packages.mkdir()
    where.mkdir()
    done = run_in_core_environment(link_core_packages(packages), installed, where, "-c", PROGRAM, *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "vit_tiny_patch16_224" in done.stdout
    assert re.search(r"top-1 +8\d\.", done.stdout)
    written = {path.name for path in where.iterdir()}
    assert written == {"explained", "run"}
    for package in ("onnx", "onnxruntime", "timm", "torchvision", "pyarrow", "tensorboard", "simplejpeg", "pytest"):
        assert not (packages / package).exists(), "the check can fail"


def list_first_commands() -> list[str]:
    """The shell start of the README: its first block of commands."""
    text = (ROOT / "README.md").read_text("utf-8").partition("```console\n")[2].partition("```")[0]
    return re.findall(r"^\$ (vitrail .+)$", text, re.MULTILINE)


@pytest.mark.slow
def test_the_shell_start_of_the_readme_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """With all dependencies from pip."""
    venv.create(tmp_path / "env", with_pip=True)
    pip = [str(tmp_path / "env" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], capture_output=True, text=True, check=False
    )
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip("needs a network to install from")
    assert done.returncode == 0, done.stderr
    commands = list_first_commands()
    assert commands
    path = os.pathsep.join((str(tmp_path / "env" / "bin"), os.environ["PATH"]))
    env = {"PATH": path, "HOME": os.environ["HOME"], "HF_HUB_OFFLINE": "1"}
    for command in commands:
        line = ["/bin/sh", "-c", command]
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
