"""--set on every command that opens a model: a field that the file does not specify."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from support.toy_datasets import write_image

import vitrail

Run = Callable[..., Any]
COMMANDS: dict[str, tuple[str, ...]] = {
    "predict": ("predict", "weights.pth", "photo.png"),
    "embed": ("embed", "weights.pth", "photo.png", "-o", "features.npy"),
    "eval": ("eval", "weights.pth", "--data", "fashion"),
    "explain": ("explain", "weights.pth", "photo.png"),
    "look": ("look", "weights.pth"),
    "report": ("report", "weights.pth"),
    "export": ("export", "weights.pth", "out"),
    "compare": ("compare", "weights.pth", "--data", "fashion"),
    "bench": ("bench", "weights.pth", "--engines", "eager", "--rounds", "1", "--starts", "0"),
    "convert": ("convert", "weights.pth", "out", "--to", "vitrail"),
    "train": ("train", "--init", "weights.pth", "--data", "fashion", "--out", "out"),
}


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Weights in the current folder whose width does not determine the number of heads."""
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "photo.png", 0)
    model = add_weight_noise(vitrail.create("DeiT-Ti", image_size=32, width=16, heads=2, depth=1, classes=10))
    torch.save({"model": model.state_dict()}, tmp_path / "weights.pth")
    return model


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("weights")
def test_field_is_used_and_an_invalid_value_is_a_one_line_error(command: str, vitrail_: Run, tmp_path: Path) -> None:
    for fields, message in (
        ((), "number of heads for width 16; expected heads=…"),
        (("--set", "heads=3"), "width 16 cannot be divided by 3 heads"),
        (("--set", "heads=2", "--set", "trained_size=32x64"), "trained_size is 32x64, which is 8 patches"),
    ):
        result = vitrail_(*COMMANDS[command], *fields)
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        assert message in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png", "weights.pth"]


@pytest.mark.usefixtures("weights")
def test_field_of_a_teacher(vitrail_: Run) -> None:
    words = ("distill", "--teacher", "weights.pth", "--data", "fashion", "--set", "depth=1", "--dry-run")
    assert "expected heads=…" in vitrail_(*words).err
    result = vitrail_(*words, "--teacher-set", "heads=3")
    assert result.code == 2
    assert "width 16 cannot be divided by 3 heads" in result.err


@pytest.mark.usefixtures("weights")
def test_predictions_depend_on_the_given_heads(vitrail_: Run) -> None:
    outputs = {vitrail_("predict", "weights.pth", "photo.png", "-f", "csv", "--set", f"heads={n}").out for n in (2, 4)}
    assert len(outputs) == 2


@pytest.mark.usefixtures("weights")
def test_inspection_lists_assumed_fields(vitrail_: Run) -> None:
    result = vitrail_("summary", "weights.pth", "--set", "heads=2", "--from", "timm")
    assert (
        "assumed        activation=gelu, norm_eps=1e-06, pool=class, trained_size=32x32, preprocessing=" in result.out
    )
    assert '"assumed": {}' in vitrail_("summary", "weights.pth", "--set", "heads=2", "--json").out
