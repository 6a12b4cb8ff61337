"""The figures of a captioned photo: words × patches, and each word without some patches."""

import numpy as np
import pytest
from support.figure_files import read_figures
from support.toy_captions import open_toy_captioner

from vitrail.base.errors import ConfigError
from vitrail.data.photos import PHOTO_FOLDER
from vitrail.inspection.explore.caption_explorer import CaptionExplorer
from vitrail.inspection.sentences.word_attention import describe_image
from vitrail.predict.search.settings import SearchSettings

CAT = (PHOTO_FOLDER / "cat.jpg").read_bytes()


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> CaptionExplorer:
    return CaptionExplorer("toy", open_toy_captioner(tmp_path_factory.mktemp("captioner") / "model"))


def test_maps_are_those_of_the_caption(explorer: CaptionExplorer) -> None:
    about, arrays = read_figures(explorer.explore(CAT, {}))
    expected = describe_image(explorer.captioner, CAT, SearchSettings())
    assert about["result"] == expected.caption.text
    assert about["words"] == list(expected.attention.words)
    maps = expected.attention.maps.transpose(1, 2, 0, 3, 4)
    np.testing.assert_allclose(arrays["weights"], maps.reshape(arrays["weights"].shape), atol=1e-6)


def test_the_words_of_a_caption_have_its_probability(explorer: CaptionExplorer) -> None:
    _, arrays = read_figures(explorer.explore(CAT, {}))
    caption = explorer.describe_photo(CAT)[2]
    assert np.log(arrays["probability"]).sum() >= caption.log_probability - 1e-4  # which counts the end, too


def test_hidden_patches_change_the_words(explorer: CaptionExplorer) -> None:
    _, whole = read_figures(explorer.explore(CAT, {}))
    about, arrays = read_figures(explorer.explore(CAT, {"part": "hide", "hide": "0.1.2.3_15"}))
    assert arrays["probability"].shape == (2, len(whole["probability"]))
    assert len(about["texts"]) == 2
    assert np.abs(arrays["probability"] - whole["probability"]).max() > 1e-6


def test_an_unknown_part_is_an_error(explorer: CaptionExplorer) -> None:
    with pytest.raises(ConfigError, match="expected all or hide"):
        explorer.explore(CAT, {"part": "layer"})
