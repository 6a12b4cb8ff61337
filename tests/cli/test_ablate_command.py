"""vitrail ablate: rows that differ in one setting, resuming, and one-line errors."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.toy_datasets import write_class_folders

from vitrail.base.errors import VitrailError
from vitrail.checkpoint.run_files import is_run_finished
from vitrail.cli import build_app
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_list import read_run_summaries, read_run_summary
from vitrail.train.trainer import DivergedError, Trainer

TINY = (
    "scratch --data photos --model DeiT-Ti --set image_size=16 --set patch_size=8 --set width=12 --set depth=1 "
    "--set heads=1 --batch 4 --epochs 2"
)


def vitrail(words: str) -> None:
    build_app()(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")


def ablate(words: str) -> None:
    vitrail(f"ablate {words}")


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_class_folders(tmp_path / "photos" / "train", ants=8, bees=8)
    write_class_folders(tmp_path / "photos" / "val", ants=4, bees=4)


def read_plan(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "run.json").read_text())


def read_times_and_bytes(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def read_weight_bytes(folder: str) -> dict[str, bytes]:
    """The bytes of all tensors; the header of the file differs each time it is written."""
    tensors = load_file(Path(folder) / "model" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_rows_differ_in_one_setting_and_the_table_matches_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    ablate(f"{TINY} --without mixup --with optimizer=sgd,lr=0.01 --seeds 2 --out out")
    out = capsys.readouterr().out
    assert "ablation of scratch on photos: 6 runs in out" in out
    assert "without-mixup          mixup 0.2 → 0\n" in out
    assert "── 4/6 without-mixup-1: mixup 0.2 → 0\n" in out
    full, without = read_plan("out/full-0")["request"], read_plan("out/without-mixup-0")["request"]
    assert {name for name in full if full[name] != without[name]} == {"recipe"}
    full, without = full["recipe"], without["recipe"]
    assert {name for name in full if full[name] != without[name]} == {"mixup"}
    other = read_plan("out/optimizer-sgd-lr-0.01-1")["recipe"]
    assert {name for name in full if full[name] != other[name]} == {"optimizer", "lr", "seed"}
    assert read_weight_bytes("out/full-0") != read_weight_bytes("out/without-mixup-0")
    rows = json.loads(Path("out/table.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["full", "without-mixup", "optimizer-sgd-lr-0.01"]
    for row in rows:
        logged = [RunFolder(Path(f"out/{row['row']}-{seed}")).read_records()[-1] for seed in (0, 1)]
        first, second = (each["val_top1"] for each in logged)
        assert [each["top1"] for each in row["runs"]] == [first, second]
        assert row["top1"] == pytest.approx((first + second) / 2)
        assert row["top1_std"] == pytest.approx(abs(first - second) / 2**0.5)
        assert row["loss"] == pytest.approx(sum(each["val_loss"] for each in logged) / 2)
        assert row["points"] == pytest.approx(100 * (row["top1"] - rows[0]["top1"]))
    assert "| without-mixup | mixup 0.2 → 0 |" in Path("out/table.md").read_text("utf-8")
    assert Path("out/ablation.png").exists()
    assert [run.state for run in read_run_summaries(Path("out"))] == ["finished"] * 6


def test_same_command_resumes_and_is_bit_identical(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{TINY} --without mixup --without erase --save-every 3 --dropout 0.1"
    ablate(f"{words} --out uninterrupted")
    ablate(f"{words} --out stopped")
    (Path("stopped") / "without-mixup-0" / "checkpoints" / "step-00000008.safetensors").unlink()
    shutil.rmtree("stopped/without-mixup-0/model")  # as if it had been killed after step 6
    shutil.rmtree("stopped/without-erase-0")
    before = read_times_and_bytes(Path("stopped/full-0"))
    capsys.readouterr()
    ablate(f"{words} --out stopped --json")
    captured = capsys.readouterr()
    assert "3 runs (1 finished, 1 to resume) in stopped" in captured.err
    assert "stopped/without-mixup-0: resuming from step-00000006 of 8 steps" in captured.err
    assert read_times_and_bytes(Path("stopped/full-0")) == before
    for row in ("full-0", "without-mixup-0", "without-erase-0"):
        assert read_weight_bytes(f"stopped/{row}") == read_weight_bytes(f"uninterrupted/{row}")
    assert json.loads(captured.out) == json.loads(Path("stopped/table.json").read_text())
    assert json.loads(captured.out)["rows"] == json.loads(Path("uninterrupted/table.json").read_text())["rows"]


def test_signal_saves_the_row_and_says_how_to_resume() -> None:
    """The same for SIGTERM: `tests/train/test_interruptions.py`."""
    words = "ablate fashion --without flip --set depth=1 --set width=12 --set heads=1 --epochs {} --out out"
    process = subprocess.Popen(
        [sys.executable, "-m", "vitrail", *shlex.split(words.format(500))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not RunFolder(Path("out/full-0")).read_records():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "full-0 stopped by SIGINT after step" in err
    assert "run the same command again to resume" in err
    assert err.count("\n") == 1
    assert read_run_summary(Path("out/full-0")).state.startswith("stopped at step")
    assert RunFolder(Path("out/full-0")).list_checkpoints()
    assert not Path("out/without-flip-0").exists()
    with pytest.raises(VitrailError, match=r"full-0 was trained with other settings: epochs 500, now 1; use"):
        vitrail(words.format(1))


def test_ablation_of_distillation(capsys: pytest.CaptureFixture[str]) -> None:
    vitrail(f"train --recipe {TINY} --out teacher")
    words = TINY.replace("DeiT-Ti", "DeiT-Ti-distilled")
    ablate(
        f"{words} --teacher teacher --without distill --with distill=soft,distilled=false "
        "--with teacher_weight=0.9 --out out"
    )
    assert read_plan("out/full-0")["teacher"]["name"] == str(Path("teacher").resolve())
    assert read_plan("out/full-0")["recipe"]["task"]["distill"] == "hard"
    without_teacher = read_plan("out/without-distill-0")
    assert without_teacher["teacher"] is None
    assert without_teacher["recipe"]["task"]["distill"] == "none"
    soft = read_plan("out/distill-soft-distilled-false-0")
    assert soft["recipe"]["task"]["distill"] == "soft"
    assert soft["model"]["config"]["distilled"] is False
    full, without, more = (
        read_weight_bytes(f"out/{row}-0") for row in ("full", "without-distill", "teacher-weight-0.9")
    )
    assert full != without != more != full
    out = capsys.readouterr().out
    assert "distill hard → soft, distilled true → false" in out


def test_table_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The runs are in the default folder."""
    ablate(f"{TINY} --without mixup -o new/table.csv")
    assert "table.md, runs/scratch-ablation/ablation.png, new/table.csv; all runs:" in capsys.readouterr().out
    heading, full, without = Path("new/table.csv").read_text("utf-8").splitlines()
    assert heading == "row,what differs,top-1,to full,loss,seeds"
    rows = json.loads(Path("runs/scratch-ablation/table.json").read_text())["rows"]
    assert full == f"full,the full recipe,{rows[0]['top1']},,{rows[0]['loss']},1"
    assert without.startswith(f"without-mixup,mixup 0.2 → 0,{rows[1]['top1']},{rows[1]['points']},")
    with pytest.raises(VitrailError, match=r"^-o new/table\.csv already exists; expected the name of a new file$"):
        ablate(f"{TINY} --without mixup -o new/table.csv")


def test_dry_run_prints_the_rows_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ablate(f"{TINY} --all --seeds 3 --dry-run")
    out = capsys.readouterr().out
    assert "27 runs in runs/scratch-ablation" in out
    assert "\n  without-weight-decay  weight_decay 0.05 → 0\n" in out
    ablate(f"{TINY} --without flip --dry-run --json")
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[1]["changes"] == {"flip": {"full": 0.5, "here": 0.0}}
    assert [path.name for path in Path().iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TINY, "nothing to compare with; expected --without"),
        (f"{TINY} --without cutmix", "cutmix is already off in recipe scratch; expected one of: mixup, erase, flip"),
        (f"{TINY} --without mixupp", "did you mean 'mixup'"),
        (f"{TINY} --without mixup --mixup 0", "mixup is already off"),
        (f"{TINY} --without mixup --without mixup", "without-mixup is the same as without-mixup"),
        (f"{TINY} --without mixup --with mixup=0", "mixup-0 is the same as without-mixup (mixup 0.2 → 0)"),
        (f"{TINY} --with mixup", "--with 'mixup'; expected FIELD=VALUE"),
        (f"{TINY} --with lr=1,lr=2", "has lr twice"),
        (f"{TINY} --with distill=soft", "set `teacher`"),
        (f"{TINY} --without distill --teacher missing", "missing"),
        (f"{TINY} --without flip --teacher-cache cache", "--teacher-cache cache without --teacher"),
        (f"{TINY} --without flip --teacher photos --teacher-cache cache", "with random augmentation"),
        (f"{TINY} --without flip --seeds 0", "--seeds 0"),
        (f"{TINY} --without flip --out photos/val/ants/0.png", "0.png is a file"),
        (f"{TINY} --without flip --device gpu", "gpu is not a device"),
        (f"{TINY} --without flip --minutes 1", "either `minutes` or `epochs`"),
        (TINY.replace("scratch", "deitt") + " --all", "did you mean 'deit'"),
    ],
)
def test_invalid_requests_are_one_line_errors_before_anything_is_written(words: str, message: str) -> None:
    with pytest.raises(VitrailError) as caught:
        ablate(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_row_that_diverges_is_a_result_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def diverging(self: Trainer, batches: Any) -> set[str]:
        if self.recipe.optimization.optimizer == "sgd":
            raise DivergedError(3, float("nan"))
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", diverging)
    with pytest.raises(VitrailError, match="1 of 3 runs failed: optimizer-sgd-0: the loss became nan at step 3"):
        ablate(f"{TINY} --with optimizer=sgd --with clip=2 --out out")
    assert is_run_finished(Path("out/clip-2-0"))
    assert "failed" in capsys.readouterr().out.split("what differs")[1]
    assert "failed" in json.loads(Path("out/table.json").read_text())["rows"][1]["runs"][0]


@pytest.mark.slow
def test_several_processes_train_the_rows_in_turn() -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitrail"]
    words = shlex.split(f"ablate {TINY} --without flip --out out")
    done = subprocess.run(
        [*start, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("what differs") == 1
    assert [run.state for run in read_run_summaries(Path("out"))] == ["finished"] * 2
    assert read_plan("out/without-flip-0")["world"] == 2
