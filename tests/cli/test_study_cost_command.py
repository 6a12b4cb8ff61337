"""vitrail study cost as a user meets it, and the group that it stands in; no time is asserted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitrail.study import sequence_cost as costs

Run = Callable[..., Any]
QUICK = ("study", "cost", "--width", "4", "--budget", "0.5")


def test_the_group_teaches_its_commands(vitrail_: Run) -> None:
    for words in (("study",), ("study", "--help")):
        said = vitrail_(*words)
        assert (said.code, said.err) == (0, "")
        shown = " ".join(said.out.replace("│", " ").split())
        assert "vitrail study cost -o cost" in shown
        assert "vitrail study positions --data" in shown
        assert "cost Measure time and memory of layers as the sequence grows" in shown
        assert "positions Train the same ViT without positions and with each kind" in shown
    assert "vitrail study cost --tokens 64,1024,2304 --budget 2" in vitrail_("study", "cost", "--help").out


def test_a_table(vitrail_: Run) -> None:
    said = vitrail_(*QUICK, "--tokens", "64,256")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert "torch" in lines[0]
    assert lines[2].split()[:4] == ["layer", "operations", "steps", "path"]
    assert [line.split()[-2:] for line in lines if line.startswith("layer")][1] == ["64", "256"]
    assert sum(line.startswith("LSTM ") for line in lines) == (3 if costs.CLEAR_REFS_FILE.exists() else 2)


def test_json_and_files(vitrail_: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    out = tmp_path / "new" / "cost"
    said = vitrail_(*QUICK, "--tokens", "256,64", "--json", "-o", out)
    assert (said.code, said.err) == (0, "")
    told = json.loads(said.out)
    assert told == json.loads((out / "cost.json").read_text("utf-8"))
    assert told["width"] == 4
    assert {cell["tokens"] for cell in told["cells"]} == {64, 256}
    assert {path.name for path in out.iterdir()} == {"cost.json", "cost.txt", "cost.png"}


def test_what_is_left_out_is_said(vitrail_: Run) -> None:
    said = vitrail_("study", "cost", "--tokens", "64,16384", "--width", "4", "--budget", "0.2")
    assert said.code == 0
    assert "vitrail: note: full, fused is left out at 16,384 tokens: a call would take more than 0.01 s" in said.err


BAD = {
    "study cots": 'Unknown command "cots". Did you mean "cost"?',
    "study cost --tokens 100": "--tokens is 100; expected squares of multiples of 8",
    "study cost --tokens 64,x": "--tokens '64,x'; expected whole numbers of at least 1",
    "study cost --width 0": "--width is 0; expected 1 to 1024",
    "study cost --budget -1": "--budget is -1 seconds; expected more than 0",
    "study cost -o file": "cannot make the folder file: ",
}


@pytest.mark.parametrize("words", BAD)
def test_words_that_do_not_fit(vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(costs, "prepare_mixer_runs", lambda *_: pytest.fail("it was measured"))  # pyright: ignore[reportUnknownLambdaType]
    said = vitrail_(*words.split())
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"vitrail: {BAD[words]}")
