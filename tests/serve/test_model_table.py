"""How models are opened for the service."""

import os
import subprocess
import sys
from pathlib import Path

from support.toy_exports import ExportFinder

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from vitrail.serve.model_table import host_model
print(host_model("toy", sys.argv[1], {}).no_explorer_reason)
print([name for name in ("torch", "safetensors", "yaml", "matplotlib") if name in sys.modules])
"""


def test_an_exported_model_is_served_without_torch(exported: ExportFinder) -> None:
    line = [sys.executable, "-c", PROGRAM, exported("onnx")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    reason, imported = done.stdout.splitlines()
    assert "is an exported model, whose layers cannot be accessed" in reason
    assert imported == "[]"
