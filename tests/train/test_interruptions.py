"""Runs that are killed, terminated or interrupted, as a user's or a machine's would be: in processes of their own."""

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
from test_train_fit import EVERYTHING, data, model

from vitrail.train.fit import fit
from vitrail.train.resume import load_newest_checkpoint_on_ranks
from vitrail.train.run_folder import RunFolder
from vitrail.train.training_state import read_training_state

SETTINGS = ["--set", "width=16", "--set", "depth=2", "--set", "heads=2", "--batch", "100", "--save-every", "100000"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def begin(folder: Path, *words: str) -> list[str]:
    train = [sys.executable, "-m", "vitrail", "train", "--recipe", "fashion", *SETTINGS, "--out", str(folder)]
    return [*train, "--epochs", "500", "--ema", "0.9", "--workers", "2", *words]


def started(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """A run in a session of its own, that has taken its first steps."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    while process.poll() is None and not RunFolder(folder).read_records():
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_saves_and_exits_as_signals_have_it(number: signal.Signals, code: int, group: bool, tmp_path: Path) -> None:
    """Sent to it alone, as by `kill`, or to its workers too, as a terminal, torchrun and `timeout` do."""
    process = started(begin(tmp_path / "run"), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").list_checkpoints()
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert "Traceback" not in err + out
    assert f"--resume {tmp_path / 'run'}" in err
    state = load_newest_checkpoint_on_ranks(RunFolder(tmp_path / "run"))
    assert state is not None
    assert f"stopped by {number.name} after step {state.metadata['step']};" in err


def sitting(folder: Path, epochs: int, workers: int = 0) -> None:
    """What a process does until it is killed."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, epochs=epochs, save_every=1))
    fit(model(), data(), recipe, run=RunFolder(folder), device="cpu", workers=workers)


def step_reached(run: RunFolder) -> int:
    """Reads every checkpoint that can be seen: each must be whole."""
    return max((int(read_training_state(path).metadata["step"]) for path in run.list_checkpoints()), default=0)


@pytest.mark.timeout(3600)
def test_killed_at_random_moments_it_ends_as_if_never_killed(tmp_path: Path, kills: int) -> None:
    """20 times here, 200 in `make torture`."""
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    chance, reached, killed = random.Random(0), 0, 0
    processes = multiprocessing.get_context("fork")
    for attempt in range(kills):
        process = processes.Process(target=sitting, args=(cut.folder, kills, attempt % 3))
        names = [path.name for path in cut.list_checkpoints()]
        process.start()
        while attempt % 4 and process.is_alive() and [path.name for path in cut.list_checkpoints()] == names:
            time.sleep(0.001)  # mostly until it got on, sometimes while it begins
        process.join(chance.uniform(0.0, 0.1))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        before, reached = reached, step_reached(cut)
        assert reached >= before
    assert killed > kills / 2, "the run was over too soon to be killed"
    assert reached > 0
    sitting(cut.folder, kills)
    sitting(whole.folder, kills)
    one, other = load_newest_checkpoint_on_ranks(whole), load_newest_checkpoint_on_ranks(cut)
    assert one is not None
    assert other is not None
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    clocks = ("seconds", "images_per_second")
    records = [
        [{name: value for name, value in each.items() if name not in clocks} for each in run.read_records()]
        for run in (whole, cut)
    ]
    assert records[0] == records[1]
    assert not list((cut.folder / "checkpoints").glob(".*")), "what a kill cut off is cleared away"
