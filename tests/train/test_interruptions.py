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
from vitrail.train.run import Run
from vitrail.train.state import read_state

SETTINGS = ["--set", "width=16", "--set", "depth=2", "--set", "heads=2", "--batch", "100", "--save-every", "3"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "vitrail", "train", *words]


def begin(folder: Path, *words: str) -> list[str]:
    return command("--data", "fashion", "--recipe", "fashion", *SETTINGS, "--out", str(folder), *words)


def start(words: list[str], where: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=where, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)


def wait_for_state(folder: Path, process: subprocess.Popen[str], count: int = 1) -> None:
    run = Run(folder)
    while process.poll() is None and len(run.states()) < count:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_saves_and_exits_as_signals_have_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start(begin(tmp_path / "run", "--epochs", "50", "--ema", "0.9", "--workers", "2"), tmp_path)
    wait_for_state(tmp_path / "run", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert number.name in err
    assert "Traceback" not in err + out
    assert f"--resume {tmp_path / 'run'}" in err
    state = Run(tmp_path / "run").latest()
    assert state is not None
    assert all(torch.isfinite(tensor).all() for tensor in state.part("model").values())


def sitting(folder: Path, epochs: int) -> None:
    """What a process does until it is killed."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, epochs=epochs, save_every=1))
    fit(model(), data(), recipe, run=Run(folder), device="cpu")


def step_reached(run: Run) -> int:
    """Reads every checkpoint that can be seen: each must be whole."""
    return max((int(read_state(path).numbers["step"]) for path in run.states()), default=0)


def test_killed_at_random_moments_it_ends_as_if_never_killed(tmp_path: Path, kills: int) -> None:
    """20 times here, 200 in `make torture`."""
    whole, cut = Run.begun(tmp_path / "whole", {}), Run.begun(tmp_path / "cut", {})
    chance, reached, killed = random.Random(0), 0, 0
    processes = multiprocessing.get_context("fork")
    for attempt in range(kills):
        process = processes.Process(target=sitting, args=(cut.folder, kills))
        names = [path.name for path in cut.states()]
        process.start()
        while attempt % 4 and process.is_alive() and [path.name for path in cut.states()] == names:
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
    one, other = whole.latest(), cut.latest()
    assert one is not None
    assert other is not None
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    clocks = ("seconds", "images_per_second")
    records = [
        [{name: value for name, value in each.items() if name not in clocks} for each in run.records()]
        for run in (whole, cut)
    ]
    assert records[0] == records[1]
    assert not list((cut.folder / "checkpoints").glob(".*")), "what a kill cut off is cleared away"
