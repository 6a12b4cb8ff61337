"""vitrail study cost on the command line, and the help of its group; no time is asserted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitrail.study import sequence_cost as costs

Run = Callable[..., Any]
QUICK = ("study", "cost", "--width", "4", "--budget", "0.5")


def test_group_help_shows_its_commands(vitrail_: Run) -> None:
    result = vitrail_("study", "--help")
    assert (result.code, result.err) == (0, "")
    help_text = " ".join(result.out.replace("│", " ").split())
    assert "cost Measure time and memory of layers as the sequence grows" in help_text
    assert "positions Compare position embeddings by training a ViT with each" in help_text
    result = vitrail_("study")
    assert (result.code, result.out) == (2, "")
    assert "or an experiment: vitrail study positions, vitrail study cost" in result.err
    assert "vitrail study cost --tokens 64,1024,2304 --budget 2" in vitrail_("study", "cost", "--help").out


def test_tables_of_time_and_memory(vitrail_: Run) -> None:
    result = vitrail_(*QUICK, "--tokens", "64,256")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "torch" in lines[0]
    assert lines[3].split()[:4] == ["layer", "operations", "steps", "path"]
    assert [line.split()[-2:] for line in lines if line.startswith("layer")][1] == ["64", "256"]
    assert sum(line.startswith("LSTM ") for line in lines) == (3 if costs.CLEAR_REFS_FILE.exists() else 2)


def test_json_equals_the_written_file(vitrail_: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    out = tmp_path / "new" / "cost"
    result = vitrail_(*QUICK, "--tokens", "256,64", "--json", "-o", out)
    assert (result.code, result.err) == (0, "")
    results = json.loads(result.out)
    assert results == json.loads((out / "cost.json").read_text("utf-8"))
    assert results["width"] == 4
    assert {cell["tokens"] for cell in results["cells"]} == {64, 256}
    assert {path.name for path in out.iterdir()} == {"cost.json", "cost.txt", "cost.png"}


def test_table_in_a_file(vitrail_: Run, tmp_path: Path) -> None:
    result = vitrail_(*QUICK, "--tokens", "64,256", "-o", tmp_path / "table.tex")
    assert (result.code, result.err) == (0, "")
    text = (tmp_path / "table.tex").read_text("utf-8")
    assert r"\begin{tabular}{lllllllll}" in text
    assert r"full, fused & O(n$^2$$\cdot$d) & O(1) & O(1) & n\textasciicircum{}2 & -- &" in text


def test_skipped_lengths_are_noted(vitrail_: Run) -> None:
    result = vitrail_("study", "cost", "--tokens", "64,16384", "--width", "4", "--budget", "0.2")
    assert result.code == 0
    assert "vitrail: note: full, fused is left out at 16,384 tokens: a call would take more than 0.01 s" in result.err


BAD = {
    "study cots": "Unknown command 'cots'. Did you mean vitrail study cost?",
    "study cost --tokens 100": "--tokens is 100; expected squares of multiples of 8",
    "study cost --tokens 64,x": "--tokens '64,x'; expected whole numbers of at least 1",
    "study cost --width 0": "--width is 0; expected 1 to 1024",
    "study cost --budget -1": "--budget is -1 seconds; expected more than 0",
    "study cost -o file": "cannot make the folder file: ",
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_arguments_are_one_line_errors(
    vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(costs, "prepare_mixer_runs", lambda *_: pytest.fail("it was measured"))  # pyright: ignore[reportUnknownLambdaType]
    result = vitrail_(*words.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"vitrail: {BAD[words]}")
