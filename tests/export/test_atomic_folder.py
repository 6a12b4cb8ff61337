"""The folder that an export is written to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.base.errors import CheckpointError
from vitrail.export.atomic_folder import check_target_folder


def test_name_of_a_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model\.onnx: an export is a folder .* such as model$"):
        check_target_folder(Path("model.onnx"), overwrite=False)


TERMINATED = """
import os, signal, sys
from pathlib import Path
from vitrail.export.atomic_folder import write_folder_atomically
with write_folder_atomically(Path(sys.argv[1])) as place:
    (place / "model.onnx").write_text("unfinished")
    os.kill(os.getpid(), signal.SIGTERM)
    print("still there")
"""


def test_sigterm_removes_the_unfinished_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")
    assert not [*tmp_path.iterdir()]
