"""vitrail predict on a thousand photos with public weights, killed repeatedly."""

import csv
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = "import sys; from vitrail.cli import main; sys.argv[0] = 'vitrail'; main()"


@pytest.mark.slow
def test_a_thousand_photos_with_kills(shared: Callable[[str], Path], tmp_path: Path) -> None:
    weights = shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors")
    photos, model, out = shared("imagenet-val-1000"), tmp_path / "model", tmp_path / "out.csv"
    vitrail = [sys.executable, "-c", PROGRAM]
    options = ["--to", "vitrail", "--preprocessing", "crop=0.875"]  # 224 of the stored 256 pixels
    subprocess.run([*vitrail, "convert", weights, model, *options], check=True, stdout=subprocess.DEVNULL)
    job = [*vitrail, "predict", model, photos, "-o", out, "--resume", "--exact"]
    rows, chance, killed = tmp_path / "out.csv.partial" / "rows.csv", random.Random(0), 0
    for _ in range(5):
        before = rows.stat().st_size if rows.exists() else 0
        process = subprocess.Popen(job, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (rows.exists() and rows.stat().st_size > before):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
        process.kill()
        killed += process.wait() == -9
    assert killed >= 3
    done = subprocess.run(job, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with shared("imagenet-val-1000-reference.csv").open() as file:
        expected = list(csv.DictReader(file))
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["file"] for row in found] == [str(photos / row["file"]) for row in expected]
    firsts = [row["vit_tiny_augreg_top5"].split()[0] for row in expected]
    assert sum(row["index_1"] == first for row, first in zip(found, firsts, strict=True)) >= 999
    right = sum(row["index_1"] == reference["label"] for row, reference in zip(found, expected, strict=True))
    assert right == 759
