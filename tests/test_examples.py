"""The demo does what the README says it does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_demo() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "86,567,656" in done.stdout
    assert "86,415,592 in layers, 152,064 bare" in done.stdout
    assert "The class token is read as 1000 logits" in done.stdout
    assert "gives every class 0.0010" in done.stdout
