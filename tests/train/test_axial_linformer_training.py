"""Axial attention and Linformer: distillation, fine-tuning, and training from scratch on the bundled images."""

from pathlib import Path

import pytest
from support.saved_models import LABELS, write_model_folder
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.cli import build_app
from vitrail.train.run_folder import RunFolder

FIELDS = {
    "linformer_tiny_patch16_224": ["depth=3", "projected=16"],  # of 50 tokens
    "axial_tiny_patch16_224": ["depth=2"],  # 7×7
}


@pytest.mark.parametrize(("teacher", "student"), [tuple(FIELDS), tuple(reversed(FIELDS))])
def test_distillation_and_fine_tuning_at_another_size(teacher: str, student: str, tmp_path: Path) -> None:
    data = write_class_folders(tmp_path / "data", **dict.fromkeys(LABELS, 4))
    model = write_model_folder(tmp_path / "teacher", teacher)
    common = ["--data", str(data), "--epochs", "1", "--batch", "4", "--val-share", "0.5"]
    words = ["distill", *common, "--teacher", str(model), "--model", student, "--image-size", "32"]
    words += ["--set", "depth=2", "--set", "width=16", "--set", "heads=2", "--out", str(tmp_path / "student")]
    tune = ["train", *common, "--init", str(tmp_path / "student"), "--image-size", "48", "--layer-decay", "0.7"]
    for each in (words, [*tune, "--train-blocks", "1", "--out", str(tmp_path / "tuned")]):
        build_app()(each, exit_on_error=False, result_action="return_value")
    before, after = (vitrail.load(tmp_path / name / "model") for name in ("student", "tuned"))
    assert (before.config.image_size, after.config.image_size) == ((32, 32), (48, 48))
    moved = {
        name
        for name, weight in after.state_dict().items()
        if "mlp" in name and not weight.equal(before.state_dict()[name])
    }
    assert {name.split(".")[1] for name in moved} == {"1"}  # only the last block


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", FIELDS)
def test_training_from_scratch_on_fashion(model: str, tmp_path: Path) -> None:
    fields = ["image_size=28", "patch_size=4", "width=64", "heads=2", "mlp_width=128", *FIELDS[model]]
    words = ["train", "--recipe", "fashion", "--model", model, *(word for each in fields for word in ("--set", each))]
    words += ["--epochs", "8", "--out", str(tmp_path / "run")]
    build_app()(words, exit_on_error=False, result_action="return_value")
    assert RunFolder(tmp_path / "run").read_records()[-1]["val_top1"] >= 0.80
