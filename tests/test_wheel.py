"""The wheel has every data file, and what it installs works outside the repository: the commands of the README, too."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.core_environment import ROOT, link_core_packages, run_in_core_environment
from support.doc_pages import Step, find_difference, read_steps

PACKAGE = ROOT / "src" / "vitrail"
COMMANDS = (
    "models vit_t*",
    "predict vit_fashion example:coffee --top 1",
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
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and the packages of this one, but without its clone of vitrail."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    run_pip("--python", folder / "bin" / "python", "install", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # a .pth in there is not read
    return folder


@pytest.fixture(scope="module")
def installed(environment: Path) -> Path:
    """Where the wheel and nothing else is installed."""
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def test_the_wheel_installs_every_file_of_the_package(installed: Path, environment: Path) -> None:
    def list_files(folder: Path) -> set[str]:
        files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)) for path in files}

    files = list_files(installed / "vitrail")
    assert files == list_files(PACKAGE)
    for needed in (
        "py.typed",
        "models/catalog/costs.json",
        "models/catalog/families.json",
        "recipes/fashion.yaml",
        "data/photos/cat.jpg",
    ):
        assert needed in files
    assert {"data/text/tatoeba/pairs.tsv.gz", "data/text/tatoeba/LICENSE"} <= files
    assert (environment / "bin" / "vitrail").exists()


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
    assert re.search(r"validation top-1 \d", done.stdout)
    written = {path.name for path in where.iterdir()}
    assert written == {"explained", "run"}
    for package in ("onnx", "onnxruntime", "timm", "torchvision", "pyarrow", "tensorboard", "simplejpeg", "pytest"):
        assert not (packages / package).exists(), "the check can fail"


def run_step_in_environment(step: Step, environment: Path, where: Path) -> str:
    """What a reader of the page would see in a new shell."""
    python = str(environment / "bin" / "python")
    command = step.kind == "command"
    env = {
        "PATH": os.pathsep.join((str(environment / "bin"), os.environ["PATH"])),
        "HOME": os.environ["HOME"],
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    done = subprocess.run(
        ["/bin/sh", "-c", step.text] if command else [python, "-c", step.text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if command else subprocess.PIPE,
        text=True,
        check=False,
        env=env,
        cwd=where,
    )
    assert done.returncode == 0, f"{step.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_steps(steps: Iterable[Step], environment: Path, where: Path) -> None:
    for step in steps:
        printed = run_step_in_environment(step, environment, where)
        difference = None if step.shown is None else find_difference(step.shown, printed)
        assert difference is None, f"{step.text}\n{difference}\nall of it:\n{printed}"


def list_readme_steps() -> list[Step]:
    return [step for step in read_steps(ROOT / "README.md") if step.mark != "network"]


ORIGIN = """
import vitrail
from vitrail.base.errors import format_install_command

print(vitrail.__file__)
print(format_install_command("text"))
"""


def test_the_installed_wheel_runs_the_first_command_of_the_readme(
    wheel: Path, environment: Path, tmp_path: Path
) -> None:
    file, command = run_step_in_environment(Step("python", ORIGIN, None, ""), environment, tmp_path).splitlines()
    assert Path(file).is_relative_to(environment)
    assert command == f"pip install '{wheel}[text]'"
    check_steps(list_readme_steps()[:1], environment, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_wheel_runs_the_readme(environment: Path, tmp_path: Path) -> None:
    steps = list_readme_steps()
    assert {step.kind for step in steps} == {"command", "python"}
    check_steps(steps, environment, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """With all dependencies and extras from pip."""
    environment, where = tmp_path / "env", tmp_path / "somewhere"
    venv.create(environment, with_pip=True)
    where.mkdir()
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    words = [*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[all]"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip("needs a network to install from")
    assert done.returncode == 0, done.stderr
    check_steps(list_readme_steps(), environment, where)
