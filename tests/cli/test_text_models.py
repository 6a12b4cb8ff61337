"""A model that reads text is refused in one line by every command and function that needs images."""

import json
import re
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.models import FAMILIES
from vitrail.models.catalog import families
from vitrail.models.catalog.preset_costs import resolve_alias

Run = Callable[..., Any]

TOY_FAMILY = '''
from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.models.base.contract import Model
from vitrail.models.base.family import Family


@dataclass(frozen=True, kw_only=True)
class ToyTextConfig:
    vocabulary: int = 8
    width: int = 4


class ToyText(Model):
    """Tokens (B, N) → logits of the next ones (B, N, vocabulary)."""

    reads = "text"

    def __init__(self, config: ToyTextConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocabulary, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) @ self.embed.weight.T


PRESETS = {"toy_text": ToyTextConfig()}
FAMILY = Family(name="toytext", config=ToyTextConfig, build=ToyText, presets=PRESETS)
'''
REFUSED = "ToyText reads text; expected a model that reads images: use vitrail translate"


@pytest.fixture
def text_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A family of one file and one line, added at run time, and a checkpoint of it in the folder `model`."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "toytext.py"
    file.write_text(TOY_FAMILY)
    spec = spec_from_file_location("vitrail.models.toytext", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vitrail.models.toytext", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(families, "FAMILIES", (*FAMILIES, "toytext"))

    def resolve_toy(name: str) -> str | None:
        return name if name == "toy_text" else resolve_alias(name)

    for module_name in ("checkpoint.model_location", "models.catalog.pretrained"):  # which read the list of presets
        monkeypatch.setattr(f"vitrail.{module_name}.resolve_alias", resolve_toy)
    model = vitrail.create("toy_text")
    vitrail.save(model, tmp_path / "model")
    return model


COMMANDS = [
    ("predict", "model", "example:cat"),
    ("embed", "model", "example:cat", "-o", "features.npy"),
    ("explain", "model", "example:cat"),
    ("look", "model"),
    ("report", "model"),
    ("compare", "model", "--data", "fashion"),
    ("probe", "model", "--data", "fashion"),
    ("bench", "model"),
    ("summary", "toy_text"),
    ("train", "--init", "model"),
    ("train", "--model", "toy_text"),
    ("distill", "--teacher", "model"),
]


def test_commands(vitrail_: Run, text_model: Any) -> None:
    del text_model
    for words in COMMANDS:
        result = vitrail_(*words)
        named = REFUSED.replace("ToyText", "model")  # by the name of a folder, or by the class of a module
        assert result.code == 2, words
        explained = "model reads text; expected a model that reads images, or a --sentence to explain"
        assert result.err.removeprefix("vitrail: ").replace(f"{Path.cwd()}/", "") in (
            f"{REFUSED}\n",
            f"{named}\n",
            f"{explained}\n",
        ), words


def test_functions(text_model: Any) -> None:
    how, data = vitrail.Preprocessing(), vitrail.open_data("fashion")
    assert data.val is not None
    images = data.val
    calls: list[Callable[[], Any]] = [
        lambda: vitrail.open_model(text_model),
        lambda: vitrail.Predictor(text_model),
        lambda: vitrail.Explainer(text_model),
        lambda: vitrail.evaluate(text_model, images),
        lambda: vitrail.probe(text_model, data),
        lambda: vitrail.export_model(text_model, "out", preprocessing=how),
        lambda: vitrail.summarize(text_model),
        lambda: vitrail.fit(text_model, data, steps=1),
    ]
    for call in calls:
        with pytest.raises(vitrail.ConfigError, match=f"^{re.escape(REFUSED)}$"):
            call()


@pytest.mark.parametrize(("preset", "kind"), [("transformer_cpu", "Transformer"), ("lstm_cpu", "Seq2Seq")])
def test_presets_that_read_text(vitrail_: Run, tmp_path: Path, preset: str, kind: str) -> None:
    """They are listed without an image size, inspected, and refused where images are read."""
    vitrail.save(vitrail.create(preset), tmp_path / "model")
    for words in (
        ("summary", preset),
        ("predict", str(tmp_path / "model"), "example:cat"),
        ("train", "--model", preset),
    ):
        result = vitrail_(*words)
        named = words[1] if words[0] == "predict" else kind
        assert (result.code, result.err) == (2, f"vitrail: {REFUSED.replace('ToyText', named)}\n")
    listed = vitrail_("models", preset).out.splitlines()[-1].split()
    assert listed[0] == preset
    assert listed[2:] == ["text"]
    assert json.loads(vitrail_("models", preset, "--json").out)[preset]["image_size"] is None
    refused = vitrail_("models", preset, "--pretrained")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "only models that read images have some" in refused.err
    inspected = vitrail_("summary", str(tmp_path / "model")).out
    assert f", {preset}\n" in inspected
    assert "head           4000 tokens\n" in inspected
    assert "\nno layers: " in inspected
