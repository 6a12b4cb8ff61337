"""vitrail env: what a bug report needs, and nothing personal."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.cli import env

ROOT = Path(__file__).parents[2]


def test_env_shows_versions_machine_and_variables(
    vitrail_: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home of somebody"
    (home / ".cache" / "vitrail").mkdir(parents=True)
    (home / ".cache" / "vitrail" / "file").write_bytes(bytes(2_000_000))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found = json.loads(vitrail_("env", "--json").out)
    assert found["Versions"]["vitrail"] == vitrail.__version__
    assert found["Versions"]["torch"] == version("torch")
    assert found["Machine"]["cores"].endswith(f"of {os.cpu_count()} usable")
    assert found["Caches"]["vitrail"] == "~/.cache/vitrail, 2.0 MB in 1 file"
    assert (found["Variables"]["OMP_NUM_THREADS"], found["Variables"]["MKL_NUM_THREADS"]) == ("3", "not set")
    text = vitrail_("env").out
    assert "somebody" not in text
    assert "secret" not in text
    assert f"  torch                {version('torch')}\n" in text


def test_a_missing_package_is_named_with_its_extra() -> None:
    assert env.describe_package("no-such-package", "fast") == (
        "no-such-package",
        "not installed; part of the extra fast",
    )
    assert env.describe_package("no-such-package") == ("no-such-package", "not installed")


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = {name_package(each): name for name in extras for each in extras[name]}
    assert {name: listed[name] for name, extra in env.EXTRAS.items() if extra} == {
        name: extra for name, extra in listed.items() if extra not in ("all", "test", "parity", "docs")
    }
    assert {name_package(each) for each in project["dependencies"]} == set(env.PACKAGES)


def name_package(requirement: str) -> str:
    """Without its extras, versions and systems."""
    return re.split(r"[^\w-]", requirement)[0]


def test_a_folder_elsewhere_shows_only_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert env.hide_home(tmp_path / "somebody" / "hub") == "…/hub"
    assert env.describe_size(tmp_path / "nowhere") == "does not exist"
