"""Packages of a core install only, as links in a folder: what `pip install vitrail` gives, without any extra."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def list_required_distributions(requirements: list[str]) -> set[str]:
    """The distributions that these requirements name, and all that those require."""
    found, left = set[str](), [Requirement(each).name for each in requirements]
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            wanted = map(Requirement, distribution(name).requires or ())
            left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link_core_packages(folder: Path) -> Path:
    """Link the packages that the core depends on into a folder."""
    for name in list_required_distributions(PROJECT["dependencies"]):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            place = Path(str(found.locate_file(top)))
            if place.exists() and not (folder / top).exists():
                (folder / top).symlink_to(place)
    return folder


def run_in_core_environment(
    packages: Path, vitrail: Path, where: Path, *words: object
) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages and the `vitrail` in a folder, without site-packages; warnings are errors."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "PYTHONPATH": os.pathsep.join(map(str, (vitrail, packages))),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", ""),
    }
    line = [sys.executable, "-S", "-s", "-W", "error", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=env, cwd=where)
