"""Processes started by torchrun give the result of one process, and evaluate every image once."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vitrail.cli import build_app
from vitrail.train.resume import load_newest_checkpoint_on_ranks
from vitrail.train.run_folder import RunFolder

PROGRAM = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = [{tests!r}, str(Path({tests!r}).parent)]
from test_distillation import student
from test_teacher import teacher
from test_train_fit import EVERYTHING, data, model
from dataclasses import replace
from vitrail.distributed import join_process_group
from vitrail.train.fit import fit
from vitrail.train.resume import load_newest_checkpoint_on_ranks
from vitrail.train.run_folder import RunFolder

recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, epochs=4, batch=8, accumulate=2))
with join_process_group() as ranks:
    for name, made, taught in (("plain", model(), None), ("distilled", student(), teacher())):
        run = RunFolder(Path({folder!r}) / name)
        result = fit(made, data(), recipe, run=run, ranks=ranks, device="cpu", teacher=taught)
        if ranks.is_first:
            weights = [float(each.double().sum()) for each in result.model.parameters()]
            found = dict(
                records=result.records, images=result.evaluation.images, weights=weights, world=ranks.world_size
            )
            (run.folder / "result.json").write_text(json.dumps(found))
"""


def train_with_torchrun(folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Train and read the results. Retried once if a process aborts (-6): seen in 1 of 150 runs on a loaded machine."""
    done = run_torchrun(folder, processes)
    if "exitcode: -6" in done.stderr:
        shutil.rmtree(folder)
        done = run_torchrun(folder, processes)
    assert done.returncode == 0, done.stderr
    return {kind: json.loads((folder / kind / "result.json").read_text()) for kind in ("plain", "distilled")}


def run_torchrun(folder: Path, processes: int) -> "subprocess.CompletedProcess[str]":
    for kind in ("plain", "distilled"):
        (folder / kind / "checkpoints").mkdir(parents=True)
    program = folder / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder)))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", program]
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """With and without a teacher, in one test: starting the processes takes most of the time."""
    results = [train_with_torchrun(tmp_path / str(count), count) for count in (1, 2)]
    for kind in ("plain", "distilled"):
        one, two = (each[kind] for each in results)
        assert (one["world"], two["world"]) == (1, 2)
        assert one["images"] == two["images"] == 24
        assert len(one["records"]) == len(two["records"]) >= 20
        for mine, its in zip(one["records"], two["records"], strict=True):
            assert mine["step"] == its["step"]
            for name in ("loss", "val_loss", "val_top1", "accuracy"):
                assert mine.get(name) == pytest.approx(its.get(name), abs=1e-5), (kind, mine)
        assert one["weights"] == pytest.approx(two["weights"], abs=1e-3), kind


def test_stopped_torchrun_run_resumes_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a time budget, for which all processes must measure the same number of steps."""
    folder = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(
        "from vitrail.train import throughput\nthroughput.MIN_TIMED_SECONDS = 0.5\n"
        "from vitrail.cli import main\nmain()\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    words = ["train", "--minutes", "0.6", "--set", "depth=1", "--set", "width=12", "--out", str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*run, *words, "--eval-every", "0"], stdout=pipe, stderr=pipe, text=True)
    while process.poll() is None and not RunFolder(folder).read_records():
        time.sleep(0.01)
    process.terminate()
    out, err = process.communicate(timeout=100)
    assert f"--resume {folder}" in err, err[-2000:]
    assert out.count("10 classes") == 1, "only the first process prints"
    state = load_newest_checkpoint_on_ranks(RunFolder(folder))
    assert state is not None
    assert {"random/0/cpu", "random/1/cpu"} <= set(state.tensors)
    plan = RunFolder(folder).load_plan()
    assert plan["world"] == 2
    assert 0 < state.metadata["step"] < plan["steps"]
    plan["steps"] = state.metadata["step"] + 2  # so that resuming does not take the rest of the budget
    (folder / "run.json").write_text(json.dumps(plan))
    build_app()(["train", "--resume", str(folder)], exit_on_error=False, result_action="return_value")
    assert "world was 2 and is 1" in capsys.readouterr().out
    assert (folder / "model" / "model.safetensors").exists()
