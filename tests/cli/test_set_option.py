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
    """Of a width that does not tell its heads, in the folder where we are."""
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "photo.png", 0)
    model = add_weight_noise(vitrail.create("DeiT-Ti", image_size=32, width=16, heads=2, depth=1, classes=10))
    torch.save({"model": model.state_dict()}, tmp_path / "weights.pth")
    return model


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("weights")
def test_the_field_reaches_the_reader_and_a_wrong_value_is_one_line(
    command: str, vitrail_: Run, tmp_path: Path
) -> None:
    for fields, message in (
        ((), "how many heads share its width of 16; expected heads=…"),
        (("--set", "heads=3"), "width 16 cannot be divided by 3 heads"),
        (("--set", "heads=2", "--set", "trained_size=32x64"), "trained_size is 32x64, which is 8 patches"),
    ):
        said = vitrail_(*COMMANDS[command], *fields)
        assert (said.code, said.err.count("\n")) == (2, 1), said.err
        assert message in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png", "weights.pth"]


@pytest.mark.usefixtures("weights")
def test_the_field_of_a_teacher(vitrail_: Run) -> None:
    words = ("distill", "--teacher", "weights.pth", "--data", "fashion", "--set", "depth=1", "--dry-run")
    assert "expected heads=…" in vitrail_(*words).err
    said = vitrail_(*words, "--teacher-set", "heads=3")
    assert said.code == 2
    assert "width 16 cannot be divided by 3 heads" in said.err


@pytest.mark.usefixtures("weights")
def test_predictions_are_those_of_the_given_heads(vitrail_: Run) -> None:
    answers = {vitrail_("predict", "weights.pth", "photo.png", "-f", "csv", "--set", f"heads={n}").out for n in (2, 4)}
    assert len(answers) == 2


@pytest.mark.usefixtures("weights")
def test_inspection_lists_what_was_assumed(vitrail_: Run) -> None:
    said = vitrail_("inspect-checkpoint", "weights.pth", "--set", "heads=2", "--from", "timm")
    assert "assumed        activation=gelu, norm_eps=1e-06, pool=class, trained_size=32x32, preprocessing=" in said.out
    assert '"assumed": {}' in vitrail_("inspect-checkpoint", "weights.pth", "--set", "heads=2", "--json").out
