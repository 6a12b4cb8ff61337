"""Pickles that call anything torch allows: bounded time and memory, a one-line error, and nothing is run."""

import re
import subprocess
import sys
from pathlib import Path

from support import hostile_pickles


def test_hostile_pickles_take_no_memory_or_time_and_run_nothing(tmp_path: Path, mutations: int) -> None:
    names = hostile_pickles.allowed_names()
    count = max(mutations // 4, 4 * len(names))  # each name in each container, in two ways
    script = str(Path(hostile_pickles.__file__))
    done = subprocess.run(
        [sys.executable, script, tmp_path, str(count)], capture_output=True, text=True, check=False, timeout=60 + count
    )
    *wrong, last = done.stdout.splitlines() or [""]
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:5]}"
    summary = re.fullmatch(rf"{count} pickles of {len(names)} names, (\d+) read", last)
    assert summary is not None, done.stderr[-2000:]
    assert int(summary[1]) > count // 100, "some are harmless and read"
