"""vitrail study: the published tables on the terminal and as files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_list_and_tables(vitrail_: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "deit.table8" in vitrail_("study", "--list").out
    shown = vitrail_("study", "--published", "vit.table8", "-o", "table8.md").out
    assert "1-D Pos. Emb.              0.64206      0.63964              0.64292" in shown
    assert shown.endswith("table8.md: written\n")
    assert "| 1-D Pos. Emb. | 0.64206 | 0.63964 | 0.64292 |" in Path("table8.md").read_text()
    found = json.loads(vitrail_("study", "--published", "deit.table2", "--json").out)
    assert found["rows"][1] == {
        "teacher": "RegNetY-4GF",
        "teacher accuracy": 80.0,
        "student 224": 82.7,
        "student fine-tuned 384": 83.6,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected --list, --published ID, or an experiment: vitrail study positions, vitrail study cost"),
        (("--published", "cait.table3"), "'cait.table3' is not a published table; did you mean"),  # known from memory
        (("--published", "vit.table8", "-o", "folder"), "-o folder; expected a file that ends in .txt, .json,"),
    ],
)
def test_wrong_calls(vitrail_: Callable[..., Any], words: tuple[str, ...], message: str) -> None:
    found = vitrail_("study", *words)
    assert (found.code, found.out) == (2, "")
    assert message in found.err
