"""The cores of a process, and how the threads of torch wait."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from vitrail.machine import SPIN_COUNT, bound_spinning, count_cores, restore_threads

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


FROM_PYTHON = "import os, vitrail; print(vitrail.machine.bound_spinning(), os.environ.get('GOMP_SPINCOUNT'))"


def test_one_call_bounds_the_spinning_unless_the_user_did() -> None:
    assert run_python(FROM_PYTHON) == f"True {SPIN_COUNT}"
    assert run_python(FROM_PYTHON, GOMP_SPINCOUNT="7") == "False 7"
    assert run_python(FROM_PYTHON, OMP_WAIT_POLICY="passive") == "False None"


def test_after_torch_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(UserWarning, match="torch is imported already"):
        assert not bound_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


COMMAND = """
import os, sys
import vitrail.cli
seen = []
vitrail.cli.build_app = lambda *_: lambda *_, **__: seen.append(("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT")))
sys.argv = ["vitrail", "models"]
try:
    vitrail.cli.main()
finally:
    print(*seen)
"""


def test_the_command_line_bounds_it_before_torch_is_imported() -> None:
    assert run_python(COMMAND) == f"(False, '{SPIN_COUNT}')"
    assert run_python(COMMAND, GOMP_SPINCOUNT="7") == "(False, '7')"


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with restore_threads():
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before
