"""The cores of a process, and how the threads of torch wait."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from vitrail.base.machine import SPIN_COUNT, bound_spinning, count_cores, restore_threads

OURS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def run_python(code: str, **variables: str) -> str:
    environment: Mapping[str, str] = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_cores_are_those_the_process_may_use() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        assert (
            run_python("import os, vitrail; os.sched_setaffinity(0, {0}); print(vitrail.machine.count_cores())") == "1"
        )


BEFORE_TORCH = "import os, sys, vitrail; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
IN_A_COMMAND = BEFORE_TORCH.replace("vitrail;", "vitrail.cli;")


@pytest.mark.parametrize("program", [BEFORE_TORCH, IN_A_COMMAND])
def test_importing_vitrail_bounds_the_spinning_unless_the_user_did(program: str) -> None:
    assert run_python(program) == f"{SPIN_COUNT} False"
    assert run_python(program, GOMP_SPINCOUNT="7") == "7 False"
    assert run_python(program, OMP_WAIT_POLICY="passive") == "None False"


def test_after_torch_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    assert not bound_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with restore_threads():
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before
