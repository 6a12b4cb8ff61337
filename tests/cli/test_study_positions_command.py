"""vitrail study positions on the command line: eight runs per seed, resuming, and one-line errors."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from support.toy_datasets import write_class_folders

from vitrail.base.errors import VitrailError
from vitrail.cli.output.help_text import reflow_docstring
from vitrail.cli.study_positions import positions
from vitrail.study.position_study import POSITION_CELLS
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_list import read_run_summaries
from vitrail.train.trainer import DivergedError, Trainer

TINY = (
    "--data photos --model ViT-Ti/16 --set image_size=16 --set patch_size=8 --set width=12 --set depth=2 --set heads=1 "
    "--batch 8 --epochs 1"
)
NAMES = [cell.name for cell in POSITION_CELLS]


def study(words: str) -> None:
    table = App(help_format="plaintext")
    table.command(reflow_docstring(positions), name="positions")
    table(shlex.split(f"positions {words}"), exit_on_error=False, print_error=False, result_action="return_value")


def skip_drawing(*_: object) -> None:
    """Replaces the curves of each run, which take longer than these runs."""


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.train.run.plot_training_curves", skip_drawing)
    write_class_folders(tmp_path / "photos" / "train", ants=8, bees=8)
    write_class_folders(tmp_path / "photos" / "val", ants=4, bees=4)


def read_plan(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "run.json").read_text())


def test_eight_cells_with_two_seeds_and_the_same_command_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    study(f"{TINY} --seeds 2")
    out = capsys.readouterr().out
    assert "by recipe positions on photos: 16 runs in runs/photos-positions\n" in out
    assert "  none       no positions\n  1d-stem    positions none → learned\n" in out
    started = [line.split()[2].rstrip(":") for line in out.splitlines() if line.startswith("── ")]
    assert started == [
        f"{name}-{seed}" for seed in (0, 1) for name in NAMES
    ]  # all cells of a seed come before the next seed
    folder = Path("runs/photos-positions")
    results = json.loads((folder / "table.json").read_text("utf-8"))
    for row, cell in zip(results["rows"], POSITION_CELLS, strict=True):
        config = read_plan(f"{folder}/{cell.name}-1")["model"]["config"]
        assert (config["positions"], config["positions_at"]) == (cell.positions, cell.positions_at)
        first, second = (RunFolder(folder / f"{cell.name}-{seed}").read_records()[-1]["val_top1"] for seed in (0, 1))
        assert row["top1"] == pytest.approx((first + second) / 2)
        assert row["paper"] == cell.paper
    assert "\n1-D        every layer, shared  " in out
    assert "paper (ViT-B/16" in out
    assert (folder / "positions.png").exists()
    assert [run.state for run in read_run_summaries(folder)] == ["finished"] * 16

    shutil.rmtree(folder / "2d-stem-1")
    study(f"{TINY} --seed 1")  # seeds may be trained by separate commands
    out = capsys.readouterr().out
    assert "8 runs (7 finished)" in out
    assert [line for line in out.splitlines() if line.startswith("── ")] == [
        "── 5/8 2d-stem-1: positions none → learned_2d"
    ]
    study(f"{TINY} --seeds 2 --json")
    again = capsys.readouterr()
    assert "16 runs (16 finished)" in again.err
    assert "── " not in again.err
    assert json.loads(again.out) == results  # the lost run has the same result as before
    with pytest.raises(VitrailError, match=r"none-0 was trained with other settings: epochs 1, now 2; use"):
        study(f"{TINY.replace('--epochs 1', '--epochs 2')} -o {folder}")


def test_dry_run_prints_the_rows_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    study(f"{TINY} --seeds 3 --dry-run")
    assert "24 runs in runs/photos-positions" in capsys.readouterr().out
    study("--dry-run --json")  # the bundled data and its recipe
    results = json.loads(capsys.readouterr().out)
    assert (results["recipe"], results["data"]) == ("fashion", "fashion")
    assert [row["row"] for row in results["rows"]] == NAMES
    assert results["rows"][0]["top1"] is None
    study("--data photos --batch 4 --dry-run")  # the study's own recipe names a model
    assert "positions of vit_tiny_patch16_224 by recipe positions on photos" in capsys.readouterr().out
    study("--data photos --recipe deit --model ViT-Ti/16 --batch 8 --dry-run")
    assert "by recipe deit on photos" in capsys.readouterr().out
    assert [path.name for path in Path().iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{TINY} --seeds 0", "--seeds 0; expected at least 1"),
        (f"{TINY} --set positions=rotary", "--set positions=rotary cannot be used here"),
        (f"{TINY} --set positions_at=layers", "--set positions_at=layers cannot be used here"),
        ("--data photos --init photos", "--init photos cannot be used here: a checkpoint was trained"),
        (TINY.replace("ViT-Ti/16", "DeiT-Ti"), "DeiT-Ti, which has no choice of positions"),
        (f"{TINY} --recipe fahsion", "did you mean 'fashion'"),
        (f"{TINY} --device gpu", "gpu is not a device"),
        (f"{TINY} --minutes 1", "either `minutes` or `epochs`"),
        (f"{TINY} --out photos/val/ants/0.png", "0.png is a file"),
        ("--data nowhere", "nowhere"),
    ],
)
def test_invalid_requests_are_one_line_errors_before_anything_is_written(words: str, message: str) -> None:
    with pytest.raises(VitrailError) as caught:
        study(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_cell_that_diverges_is_a_result_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def diverging(self: Trainer, batches: Any) -> set[str]:
        if self.recipe.fields["positions"] == "relative":
            raise DivergedError(3, float("nan"))
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", diverging)
    with pytest.raises(VitrailError, match="1 of 8 runs failed: relative-0: the loss became nan at step 3"):
        study(f"{TINY} --out out")
    assert "here (validation top-1): " in capsys.readouterr().out
    assert "| relative |  | failed |" in Path("out/table.md").read_text("utf-8")
