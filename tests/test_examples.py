"""The examples run and print what the README shows."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(where: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / words[0], *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=where,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tour(tmp_path: Path) -> None:
    out = run(tmp_path, "tour.py")
    for shown in (
        "86,567,656",
        "86,415,592 in layers, 152,064 bare",
        "The head maps the class token to 1000 logits",
        "gives every class the probability 0.0010",
    ):
        assert shown in out


def test_demo(tmp_path: Path) -> None:
    """With a fifth of an epoch instead of the recipe's many: its accuracy is measured in docs/results.md."""
    out = run(tmp_path, "demo.py", "--epochs", "0.2")
    for shown in ("vitrail train --out", "10 classes", "validation top-1", "prediction", "vitrail eval"):
        assert shown in out
    assert (tmp_path / "runs" / "demo-1" / "curves.png").exists()
    assert (tmp_path / "runs" / "demo-1" / "model" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "demo-1" / "explained" / "photo.grad-rollout.png").exists()
    assert "Explanations" in (tmp_path / "runs" / "demo-1" / "report.html").read_text("utf-8")
