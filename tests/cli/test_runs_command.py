"""vitrail runs on the command line."""

import json
import re
from pathlib import Path

import pytest

from vitrail.base.errors import ConfigError, DataError
from vitrail.cli import build_app


def run(*words: object) -> None:
    build_app()(
        [str(word) for word in ("runs", *words)], exit_on_error=False, print_error=False, result_action="return_value"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished, a killed, a damaged and an empty run."""
    rows = [{"step": n, "epoch": n / 2, "loss": 1 / n, "seconds": 1800.4 * n} for n in (1, 2, 3)]
    rows += [{"step": 4, "epoch": 2.0, "val_top1": 0.75, "val_loss": 0.5, "seconds": 7201.6}]
    for name, count in (("done", 4), ("killed", 2), ("odd\x1b[31m", 0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        plan = {"model": {"name": "ViT-Ti/16"}, "data": {"name": "fashion"}, "recipe": {"name": "scratch"}, "steps": 4}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(plan) if count else "{")
        (tmp_path / "runs" / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    (tmp_path / "runs" / "done" / "model").mkdir()
    (tmp_path / "runs" / "done" / "model" / "config.json").write_text("{}")
    (tmp_path / "runs" / "void").mkdir()
    return tmp_path / "runs"


def test_table_of_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder.parent)
    run()
    lines = capsys.readouterr().out.splitlines()
    names = "run model data recipe steps val-top-1 best-top-1 val-loss train-loss time state"
    assert re.split(r"\s{2,}", lines[0]) == [name.replace("-", " ", 1) for name in names.split()]
    first = "done ViT-Ti/16 fashion scratch 4/4 75.00% 75.00% 0.5000 0.3333 2:00:02 finished"
    assert lines[2].split() == first.split()
    assert lines[3].split() == [
        "killed",
        "ViT-Ti/16",
        "fashion",
        "scratch",
        "2/4",
        "0.5000",
        "1:00:01",
        *["stopped", "at", "step", "2"],
    ]
    assert lines[4].startswith(r"odd\x1b[31m ")
    assert "damaged: run.json: Expecting property name" in lines[4]
    assert lines[5].split()[:2] == ["void", "0/?"]


def test_teachers_have_a_column_if_there_are_any(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"model": {"name": "DeiT-Ti"}, "teacher": {"name": "/data/runs/big/model", "fingerprint": "0"}}
    (folder / "killed" / "run.json").write_text(json.dumps(plan))
    run(folder)
    lines = capsys.readouterr().out.splitlines()
    start = lines[0].index("teacher")
    assert [line[start:].split("  ")[0] for line in lines[2:4]] == ["", "big"]


def test_json_has_one_entry_per_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--json")
    data = json.loads(capsys.readouterr().out)
    assert [each["state"].split(":")[0] for each in data] == ["finished", "stopped at step 2", "damaged", "damaged"]
    assert data[0]["best_val_top1"] == 0.75
    assert (data[0]["val_loss"], data[0]["train_loss"], data[0]["epoch"]) == (0.5, 1 / 3, 2.0)
    assert (data[0]["model"], data[0]["teacher"], data[0]["config"]) == ("ViT-Ti/16", "", {})
    run(folder / "killed", "--json")
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["killed"]


def test_curves_are_plotted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    run(folder, "--out", tmp_path / "curves.png")
    assert capsys.readouterr().out.endswith(f"\ncurves in {tmp_path / 'curves.png'}\n")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", [".txt", ".json", ".csv", ".md", ".tex", ".html"])
def test_table_in_a_file(folder: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"new/table{suffix}"
    run(folder, "-o", path)
    assert capsys.readouterr().out.endswith(f"\nwritten: {path}\n")
    text = path.read_text("utf-8")
    assert ("0.3333333333333333" if suffix in (".json", ".csv") else "0.3333") in text
    assert text.isprintable() or not {"\x1b", "\x00"} & {*text}
    with pytest.raises(ConfigError, match="already exists"):
        run(folder, "-o", path)
    run(folder, "-o", path, "--overwrite")


def test_folder_without_runs_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no runs; expected folders with a run\.json, as written by"):
        run(tmp_path)
    with pytest.raises(
        DataError, match=r"nowhere cannot be read: No such file or directory; expected a folder of runs"
    ):
        run(tmp_path / "nowhere")
