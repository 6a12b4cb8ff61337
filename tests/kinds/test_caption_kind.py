"""Open a captioner: two model folders, and what is wrong with others."""

from pathlib import Path

import pytest
import torch
from support.saved_models import write_model_folder
from support.toy_captions import make_encoder, open_toy_captioner, write_toy_captioner

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError, VitrailError
from vitrail.opening import detect_kind, open_model


def test_both_parts_are_opened_with_preprocessing_and_tokenizer(tmp_path: Path) -> None:
    loaded = open_toy_captioner(tmp_path / "model")
    assert loaded.model.encode(torch.zeros(2, 1, 56, 56)).tokens.shape == (2, 17, 16)
    assert loaded.preprocessing.image_size == (56, 56)
    assert not loaded.model.training
    assert loaded.tokenizer.vocabulary == loaded.model.decoder.config.vocabulary
    assert ", caption, CaptionModel, " in repr(loaded)
    assert open_model(loaded, kind="caption").model is loaded.model
    assert detect_kind(str(tmp_path / "model"))[0] == "caption"
    assert detect_kind(str(tmp_path / "model" / "encoder"))[0] == "image"
    assert detect_kind(str(tmp_path / "model" / "decoder"))[0] == "text"


def test_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "images")
    folder = write_toy_captioner(tmp_path / "half")
    (folder / "decoder" / "config.json").unlink()
    for given, message in (
        (tmp_path / "images", "reads images; expected a model that describes images: use vitrail predict"),
        (tmp_path / "nothing", "does not exist"),
        (folder, "half is not a captioner: .* has no encoder/ and decoder/; expected a run of the task caption"),
        ("vit_fashion", "vit_fashion reads images; expected a model that describes images"),
        ("", "the model is ''; expected a name"),
    ):
        with pytest.raises(VitrailError, match=message):
            open_model(given, kind="caption")


def test_a_captioner_is_refused_where_one_model_is_needed(tmp_path: Path) -> None:
    folder = write_toy_captioner(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"is a captioner of two models; describe images with `vitrail caption`"):
        vitrail.load(folder)
    with pytest.raises(ConfigError, match="model describes images; expected a model that reads images: use vitrail"):
        vitrail.Predictor(folder)
    with pytest.raises(ConfigError, match="decoder reads text; expected a model that reads images: use vitrail trans"):
        vitrail.Predictor(folder / "decoder")
    assert vitrail.open_model(folder / "encoder").classes == 0


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    folder = write_toy_captioner(tmp_path / "model")
    (folder / "decoder" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; expected the tokenizer"):
        open_model(folder, kind="caption")


def test_parts_of_different_captioners_are_refused(tmp_path: Path) -> None:
    folder = write_toy_captioner(tmp_path / "model")
    vitrail.save(
        make_encoder(width=32), folder / "encoder", preprocessing=vitrail.describe(folder / "encoder").preprocessing
    )
    with pytest.raises(
        ConfigError, match="the decoder reads tokens of width 16; expected 32, the width of the encoder"
    ):
        open_model(folder, kind="caption")
