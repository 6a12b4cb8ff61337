"""Runs that are killed, terminated or interrupted, each in its own process."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_fit import EVERYTHING, create_runs, data, model

from vitrail.recipes.recipe import Precision
from vitrail.train.fit import fit
from vitrail.train.restore import load_newest_checkpoint_on_ranks
from vitrail.train.run_folder import RunFolder
from vitrail.train.training_state import read_training_state

SETTINGS = ["--set", "width=16", "--set", "depth=2", "--set", "heads=2", "--batch", "100", "--save-every", "100000"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def train_command(folder: Path, *words: str) -> list[str]:
    train = [sys.executable, "-m", "vitrail", "train", "--recipe", "fashion", *SETTINGS, "--out", str(folder)]
    return [*train, "--epochs", "500", "--ema", "0.9", "--workers", "2", *words]


def start_and_wait_for_first_steps(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a run in its own session and wait for its first steps."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    while process.poll() is None and not RunFolder(folder).read_records():
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.parametrize(
    ("number", "code", "group"),
    [
        pytest.param(signal.SIGTERM, 143, False, id="by kill"),
        pytest.param(signal.SIGTERM, 143, True, id="by timeout"),
        pytest.param(signal.SIGINT, 130, True, id="by a terminal"),
    ],
)
def test_signal_saves_a_checkpoint_and_sets_the_exit_code(
    number: signal.Signals, code: int, group: bool, tmp_path: Path
) -> None:
    """Sent to the process alone, as by `kill`, or also to its workers, as by a terminal, torchrun and `timeout`.

    SIGINT to the process alone: `tests/cli/test_ablate_command.py`.
    """
    process = start_and_wait_for_first_steps(train_command(tmp_path / "run"), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").list_checkpoints()
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code, err
    assert "Traceback" not in err + out
    assert f"--resume {tmp_path / 'run'}" in err
    state = load_newest_checkpoint_on_ranks(RunFolder(tmp_path / "run"))
    assert state is not None
    assert f"stopped by {number.name} after step {state.metadata['step']};" in err


def train_in_process(folder: Path, epochs: int, workers: int, precision: Precision) -> None:
    """Train in the current process, until it is killed."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, epochs=epochs, save_every=1, precision=precision))
    fit(model(), data(), recipe, run=RunFolder(folder), device="cpu", workers=workers)


def read_newest_step(run: RunFolder) -> int:
    """Read every checkpoint, since each must be intact, and return the newest step."""
    return max((int(read_training_state(path).metadata["step"]) for path in run.list_checkpoints()), default=0)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("precision", "share"), [("float32", 1.0), ("bfloat16", 0.25)])
def test_resume_is_bit_identical_after_random_kills(
    precision: Precision, share: float, tmp_path: Path, kills: int
) -> None:
    """12 kills by default, 200 in `make torture`; fewer in bfloat16, which is slow on some CPUs."""
    kills = round(kills * share)
    uninterrupted, stopped = create_runs(tmp_path)
    chance, reached, killed = random.Random(0), 0, 0
    processes = multiprocessing.get_context("fork")
    for attempt in range(kills):
        process = processes.Process(target=train_in_process, args=(stopped.folder, kills, attempt % 3, precision))
        names = [path.name for path in stopped.list_checkpoints()]
        process.start()
        while attempt % 4 and process.is_alive() and [path.name for path in stopped.list_checkpoints()] == names:
            time.sleep(0.001)  # mostly after a new checkpoint, sometimes during the start
        process.join(chance.uniform(0.0, 0.1))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        before, reached = reached, read_newest_step(stopped)
        assert reached >= before
    assert killed > kills / 2, "the run finished before it could be killed"
    assert reached > 0
    train_in_process(stopped.folder, kills, 0, precision)
    train_in_process(uninterrupted.folder, kills, 0, precision)
    one, other = load_newest_checkpoint_on_ranks(uninterrupted), load_newest_checkpoint_on_ranks(stopped)
    assert one is not None
    assert other is not None
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    clocks = ("seconds", "images_per_second")
    records = [
        [{name: value for name, value in each.items() if name not in clocks} for each in run.read_records()]
        for run in (uninterrupted, stopped)
    ]
    assert records[0] == records[1]
    assert not list((stopped.folder / "checkpoints").glob(".*")), "unfinished files of a kill are removed"
