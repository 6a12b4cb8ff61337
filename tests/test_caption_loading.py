"""Open a captioner: two model folders, and what is wrong with others."""

from pathlib import Path

import pytest
import torch
from support.saved_models import write_model_folder
from support.toy_captions import make_encoder, open_toy_captioner, write_toy_captioner

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.caption_loading import is_caption_model, open_caption_model


def test_both_parts_are_opened_with_preprocessing_and_tokenizer(tmp_path: Path) -> None:
    loaded = open_toy_captioner(tmp_path / "model")
    assert loaded.model.encode(torch.zeros(2, 1, 56, 56)).tokens.shape == (2, 17, 16)
    assert loaded.preprocessing.image_size == (56, 56)
    assert not loaded.model.training
    assert loaded.tokenizer.vocabulary == loaded.model.decoder.config.vocabulary
    assert "ViT of" in repr(loaded)
    assert open_caption_model(loaded) is loaded
    assert is_caption_model(str(tmp_path / "model"))
    assert not is_caption_model(str(tmp_path / "model" / "encoder"))
    assert not is_caption_model("vit_fashion")


def test_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "images")
    for given, message in (
        (
            tmp_path / "images",
            "is not a captioner: .* has no encoder/ and decoder/; expected a run of the task caption",
        ),
        (tmp_path / "nothing", "is not a captioner: .* does not exist"),
        ("vit_fashion", "vit_fashion is not a captioner"),
        ("", "the model is ''; expected a run of captions"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_caption_model(given)


def test_a_captioner_is_refused_where_one_model_is_needed(tmp_path: Path) -> None:
    folder = write_toy_captioner(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"is a captioner of two models; describe images with `vitrail caption`"):
        vitrail.open_model(folder)
    with pytest.raises(ConfigError, match="Transformer reads text; expected a model that reads images"):
        vitrail.open_model(folder / "decoder")
    assert vitrail.open_model(folder / "encoder").classes == 0


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    folder = write_toy_captioner(tmp_path / "model")
    (folder / "decoder" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; expected the tokenizer"):
        open_caption_model(folder)


def test_parts_of_different_captioners_are_refused(tmp_path: Path) -> None:
    folder = write_toy_captioner(tmp_path / "model")
    vitrail.save(
        make_encoder(width=32), folder / "encoder", preprocessing=vitrail.describe(folder / "encoder").preprocessing
    )
    with pytest.raises(
        ConfigError, match="the decoder reads tokens of width 16; expected 32, the width of the encoder"
    ):
        open_caption_model(folder)
