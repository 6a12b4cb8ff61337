"""A model without preprocessing: every command assumes the same values and warns once; --preprocessing sets it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.noisy_weights import add_weight_noise
from support.toy_datasets import write_image

import vitrail

Run = Callable[..., Any]
COMMANDS: dict[str, tuple[str, ...]] = {
    "predict": ("predict", "model", "photo.png"),
    "embed": ("embed", "model", "photo.png", "-o", "features.npy", "--overwrite"),
    "eval": ("eval", "model", "--data", "fashion"),
    "compare": ("compare", "model", "--data", "fashion"),
    "explain": ("explain", "model", "photo.png"),
    "look": ("look", "model"),
    "report": ("report", "model"),
    "bench": ("bench", "model", "--engines", "eager", "--batches", "1", "--rounds", "1", "--starts", "0"),
    "export": ("export", "model", "out", "--to", "torch-export"),
    "train": ("train", "--init", "model", "--data", "fashion", "--dry-run"),
}
ASSUMED = "model does not specify preprocessing; assumed preprocessing=mean (0.5,), crop 0.9, bicubic"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "photo.png", 0)
    fields: dict[str, Any] = {"image_size": 28, "patch_size": 14, "channels": 1, "width": 16, "heads": 2, "depth": 1}
    net = add_weight_noise(vitrail.create("ViT-Ti/16", classes=10, **fields))
    vitrail.save(net, "model", labels=vitrail.open_data("fashion").classes)
    return tmp_path / "model"


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the slow work that follows opening a model."""

    def stop(*_: Any, **__: Any) -> None:
        raise vitrail.ConfigError("stopped")

    for name in (
        *("report.model_report.build_model_report", "inspection.model_figures.look"),  # the first imports the second
        *(
            "evaluation.evaluate.evaluate",
            "study.compare.compare",
            "export.export.export_model",
            "study.bench.BenchCase",
        ),
    ):
        monkeypatch.setattr(f"vitrail.{name}", stop)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("model", "no_work")
def test_every_command_assumes_the_same_and_says_it_once(command: str, vitrail_: Run) -> None:
    result = vitrail_(*COMMANDS[command])
    warned = [line for line in result.err.splitlines() if line.startswith("vitrail: warning: ")]
    assert len(warned) == 1, result.err
    assert ASSUMED in warned[0]
    assert result.code == 0 or result.err.endswith("vitrail: stopped\n"), result.err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
@pytest.mark.usefixtures("model", "no_work")
def test_every_command_takes_preprocessing(command: str, vitrail_: Run) -> None:
    given = ("--preprocessing", "mean=[0.3]", "--preprocessing", "std=[0.2]")
    result = vitrail_(*COMMANDS[command], *given)
    assert not re.search("does not specify preprocessing", result.err)
    assert result.code == 0 or result.err.endswith("vitrail: stopped\n"), result.err
    wrong = vitrail_(*COMMANDS[command], "--preprocessing", "mean=[0.3,0.3,0.3]", "--preprocessing", "std=[1,1,1]")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1), wrong.err
    assert "--preprocessing has 3 channels; expected 1" in wrong.err
