"""Folders of targets appear completely or not at all."""

from pathlib import Path
from typing import get_args

import pytest
from support.target_folders import WriteTarget

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.cli.export import Target as CommandTarget
from vitrail.export.targets import table
from vitrail.export.targets.deployment import Deployment, name_deployment


def test_the_command_knows_all_targets() -> None:
    assert set(get_args(CommandTarget)) == set(table.TARGETS)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("deploy/Fine_Model.v2/", "fine-model-v2"), ("16", "model-16"), ("ä", "model"), ("x" * 99, "x" * 50)],
)
def test_names_are_accepted_everywhere(folder: str, name: str) -> None:
    assert name_deployment(Path(folder)) == name


def test_nothing_is_left_after_an_error(
    write_target: WriteTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: Deployment) -> list[str]:
        raise CheckpointError("no space")

    changed = {**table.TARGETS, "triton": table.Target("{name}/1", "", (*table.TARGETS["triton"].writers, fail))}
    monkeypatch.setattr(table, "TARGETS", changed)
    with pytest.raises(CheckpointError, match="no space"):
        write_target("triton")
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced(write_target: WriteTarget, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_target("triton", name="empty")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="empty already exists; `for_target` writes a new folder"):
        write_target("triton", name="empty")
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ConfigError, match="unknown target 'tritonn'; did you mean 'triton'"):
        write_target("tritonn")
