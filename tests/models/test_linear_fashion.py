"""Attention along lines and over mixtures learns as the full one does: the embedded pictures, from nothing."""

from pathlib import Path

import pytest

from vitrail.cli import app
from vitrail.train.run import Run

FIELDS = {
    "linformer_tiny_patch16_224": ["depth=3", "projected=16"],  # of 50 tokens
    "axial_tiny_patch16_224": ["depth=2"],  # 7×7
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", FIELDS)
def test_fashion_from_scratch(model: str, tmp_path: Path) -> None:
    fields = ["image_size=28", "patch_size=4", "width=64", "heads=2", "mlp_width=128", *FIELDS[model]]
    words = ["train", "--recipe", "fashion", "--model", model, *(word for each in fields for word in ("--set", each))]
    words += ["--epochs", "8", "--out", str(tmp_path / "run")]
    app()(words, exit_on_error=False, result_action="return_value")
    assert Run(tmp_path / "run").records()[-1]["val_top1"] >= 0.80
