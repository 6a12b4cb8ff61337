"""Models in a table are named by the shortest unique end of their path."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.models.catalog.preset_costs import shorten_model_names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/a/model", "runs/b/model", "weights.pth"], ["a/model", "b/model", "weights.pth"]),
        (["x/a/model/", "y/a/model", "b/model"], ["x/a/model", "y/a/model", "b/model"]),
        (["a", "b/a"], ["a", "b/a"]),
        (["runs/a", "runs/a", "runs/a"], ["a", "a (2)", "a (3)"]),
        (["timm:resnet18.a1", "hf-hub:timm/vit_tiny"], ["timm:resnet18.a1", "vit_tiny"]),
        (["ground truth"], ["ground truth (2)"]),
        (["ViT-Ti/16", "/home/me/runs/ants-1", "ViT-S/16"], ["ViT-Ti/16", "ants-1", "ViT-S/16"]),
    ],
)
def test_names_are_short_and_unique(names: list[str], expected: list[str]) -> None:
    assert shorten_model_names(names, taken=("ground truth",)) == expected


def test_current_folder_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "in").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "in")
    assert shorten_model_names([".", ".."]) == ["in", "run"]


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("/".join), min_size=1, max_size=6))
def test_names_are_always_unique(names: list[str]) -> None:
    found = shorten_model_names(names)
    assert len(set(found)) == len(names)
